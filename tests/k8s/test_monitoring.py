"""Dashboards, rules and scrape configurations, read as files; what takes Prometheus itself is in test_promtool.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from cluster.cli.main import main
from deployments.metrics.families import FAMILIES, Family
from deployments.monitoring import BOARDS, files
from deployments.monitoring.charts import CHOSEN, CHOSEN_MODEL
from deployments.monitoring.resources import NODES
from deployments.monitoring.rules import PAGE, SLOS
from deployments.operate.status import UPDATE_LATE
from tests.k8s.alert_cases import CASES
from tests.k8s.examples import pods, selects
from tests.k8s.test_examples import what_is_wrong

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("_bucket", "_sum", "_count")
FILES = files()
RULES = yaml.safe_load(FILES["rules.yml"])
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
DASHBOARDS = {board.name: json.loads(FILES[f"dashboards/{board.name}.json"]) for board in BOARDS}
OBJECTS = {one["kind"]: one for one in yaml.safe_load_all(FILES["kubernetes.yaml"])}


def series_of(family: Family) -> list[str]:
    return [family.series + part for part in (PARTS if family.kind == "histogram" else ("",))]


SERIES = {name: family for family in FAMILIES for name in series_of(family)}
FOREIGN = ("ray_node_gram_used", "ray_node_gram_available", "ray_serve_application_status")
FOREIGN += ("kuberay_service_condition_ready", UPDATE_LATE)
"""Series of no replica of the application that alerts ask for."""
GAUGES = {family.series for family in FAMILIES if family.kind == "gauge"}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def names(expression: str) -> list[str]:
    return re.findall(r"\b(?:specdec[_:]|ray_|kuberay_)(?!io_)[\w:]+", re.sub(r'"[^"]*"', "", expression))


def test_render_writes_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--monitoring", str(tmp_path / "mine")]) == 0
    written = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert written == set(FILES)
    assert len(capsys.readouterr().out.splitlines()) == len(FILES) == 7
    assert all((tmp_path / "mine" / name).read_text() == text for name, text in FILES.items())


def test_objects_for_kubernetes_are_valid_and_the_same_as_the_files() -> None:
    assert {kind: what_is_wrong(one) for kind, one in OBJECTS.items()} == {
        "PodMonitor": [],
        "PrometheusRule": [],
        "ConfigMap": [],
    }
    assert OBJECTS["PrometheusRule"]["spec"] == RULES
    assert {f"dashboards/{name}": text for name, text in OBJECTS["ConfigMap"]["data"].items()} == {
        name: text for name, text in FILES.items() if name.startswith("dashboards/")
    }
    assert all(one["metadata"]["labels"]["release"] == "prometheus" for one in OBJECTS.values())
    monitored = OBJECTS["PodMonitor"]["spec"]["selector"]
    assert all(selects(monitored, pod) for _, pod in pods("prod"))


def with_those_of(read: Any, given: Any) -> Any:
    """What was read, without the keys that were not given."""
    if isinstance(given, dict):
        return {key: with_those_of(read[key], value) for key, value in given.items() if key in read}
    if isinstance(given, list):
        return [with_those_of(one, value) for one, value in zip(read, given, strict=True)]
    return read


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_what_its_schema_knows(name: str) -> None:
    """Whatever the schema lacks is lost as it is read; what is left out has its default."""
    register_default_plugins()
    dashboard = DASHBOARDS[name]
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert with_those_of(read, dashboard) == dashboard
    assert dashboard["uid"] == f"specdec-{name}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert ids == list(range(1, len(ids) + 1))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_reader_chooses_source_namespace_model_and_replica(name: str) -> None:
    source, *choices = DASHBOARDS[name]["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert [choice["name"] for choice in choices] == ["namespace", "model", "replica"]
    for choice in choices:
        assert (choice["includeAll"], choice["multi"], choice["allValue"]) == (True, True, ".*")
        assert choice["current"]["value"] == "$__all"
        (series,) = names(choice["query"])
        assert set(SERIES[series].parts) == {"ingress", "router", "target", "draft"}, "every replica is offered"


@pytest.mark.parametrize("query", [query for dashboard in DASHBOARDS.values() for query in queries(dashboard)])
def test_a_query_asks_for_what_there_is_as_it_should(query: str) -> None:
    used = names(query)
    assert used
    for name in used:
        chosen = re.findall(rf"\b{name}{{([^}}]*)}}", query)
        assert len(chosen) == used.count(name), "without the reader's choice"
        if name in NODES:
            assert set(chosen) == {'namespace=~"$namespace"'}
        elif name in RECORDED:
            assert set(chosen) == {CHOSEN_MODEL}
        else:
            assert all(one.startswith(CHOSEN) for one in chosen)
            check_use(name, query)


@pytest.mark.parametrize("rule", [rule for group in RULES["groups"] for rule in group["rules"]], ids=str)
def test_a_rule_asks_for_what_there_is_as_it_should(rule: dict[str, Any]) -> None:
    used = names(rule["expr"])
    assert used
    for name in set(used) - RECORDED - set(FOREIGN):
        check_use(name, rule["expr"])


def check_use(name: str, expression: str) -> None:
    """A counter is read as a rate and a gauge as it is; a label that is asked for is one that the family has."""
    uses = re.findall(rf"(\w+)? ?\({name}\b|^{name}\b|\b{name}\b", expression)
    assert uses
    rates = re.findall(rf"\b(?:rate|increase)\({name}\b", expression)
    assert len(rates) == (0 if name in GAUGES else len(uses)), expression
    own = {
        *SERIES[name].labels,
        "deployment",
        "replica",
        "namespace",
        "ray_io_cluster",
        "model_name",
        "application",
        "le",
    }
    for matcher in re.findall(rf"\b{name}{{([^}}]*)}}", expression):
        assert set(re.findall(r"(\w+)=", matcher)) <= own
    if name.endswith("_bucket") and "histogram_quantile" in expression:
        assert re.search(rf"histogram_quantile\([\d.]+, sum by \([^)]*\ble\) \(rate\({name}\b", expression)


def test_every_series_of_rays_that_is_shown_is_kept() -> None:
    shown = {name for dashboard in DASHBOARDS.values() for query in queries(dashboard) for name in names(query)}
    assert {name for name in shown if name.startswith("ray_")} == set(NODES)


def test_every_series_of_rays_that_an_alert_asks_for_is_kept() -> None:
    asked = {name for alert in ALERTS.values() for name in names(alert["expr"]) if name.startswith("ray_")}
    assert asked
    assert [name for name in asked if relabelled(name, plain_rules()) != name] == []


def test_slos_are_bounds_of_their_histograms() -> None:
    for slo in SLOS:
        assert slo.most_s in slo.family.buckets


def test_every_alert_says_what_to_do_and_is_tried_both_ways() -> None:
    assert {case.alert for case in CASES} == set(ALERTS)
    for alert in ALERTS.values():
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"[A-Z][^\n]*[^.]", alert["annotations"]["summary"])
        assert re.fullmatch(r"[A-Z][^\n]*\.", alert["annotations"]["runbook"])


def test_every_alert_leads_to_a_section_that_names_it() -> None:
    text = (ROOT / PAGE).read_text()
    sections = {
        re.sub(r"[^a-z0-9 ]", "", part.split("\n")[0].lower()).replace(" ", "-"): part for part in text.split("\n## ")
    }
    for name, alert in ALERTS.items():
        page, _, section = alert["annotations"]["docs"].partition("#")
        assert page == PAGE
        assert f"`{name}`" in sections[section], f"{name}: {section}"
    assert set(re.findall(r"`(Specdec\w+)`", text)) == set(ALERTS), "a name that is no alert's"


def relabelled(name: str, rules: list[dict[str, Any]]) -> str | None:
    """The name that a series gets by a list of relabelling rules; None where it is dropped."""
    for rule in rules:
        found = re.fullmatch(rule["regex"], name)
        match rule.get("action", "replace"):
            case "replace" if found:
                assert rule["source_labels"] == [rule["target_label"]] == ["__name__"]
                name = re.sub(r"\$(\d)", lambda group, found=found: found[int(group[1])] or "", rule["replacement"])
            case "keep" if not found:
                return None
    return name


def plain_rules() -> list[dict[str, Any]]:
    (job,) = yaml.safe_load(FILES["prometheus.yml"])["scrape_configs"]
    return job["metric_relabel_configs"]


def test_both_ways_of_scraping_ray_relabel_alike() -> None:
    (endpoint,) = OBJECTS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    monitors = [{snake.get(key, key): value for key, value in rule.items()} for rule in endpoint["metricRelabelings"]]
    assert monitors == plain_rules()


def test_names_of_ray_become_ours() -> None:
    rules = plain_rules()
    for name, family in SERIES.items():
        of_ray = f"ray_{name}" + ("_total" if family.kind == "histogram" else "")
        assert relabelled(of_ray, rules) == name
    assert relabelled("ray_node_mem_used", rules) == "ray_node_mem_used"
    assert relabelled("ray_node_disk_usage", rules) is None
    assert all(relabelled(name, rules) == name for name in NODES)
    (dropped,) = [rule["regex"] for rule in rules if rule.get("action") == "labeldrop"]
    ours = {"application", "deployment", "replica", "model_name"}.union(*(family.labels for family in FAMILIES))
    assert not [label for label in ours if re.fullmatch(dropped, label)]
