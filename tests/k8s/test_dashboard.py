from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DASHBOARD = Path(__file__).resolve().parents[2] / "k8s" / "monitoring" / "grafana-specdec.json"
COUNTERS = {
    "specdec_generation_tokens_total",
    "specdec_spec_decode_num_drafts_total",
    "specdec_spec_decode_num_draft_tokens_total",
    "specdec_spec_decode_num_accepted_tokens_total",
    "specdec_spec_decode_num_accepted_tokens_per_pos_total",
}
HISTOGRAMS = {
    "specdec_time_to_first_token_seconds",
    "specdec_inter_token_latency_seconds",
    "specdec_e2e_request_latency_seconds",
}
GAUGES = {"specdec_num_requests_running"}
SERIES = COUNTERS | GAUGES | {f"{name}_bucket" for name in HISTOGRAMS}
ROW_WIDTH = 24


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text())


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard):
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def names(expression):
    return set(re.findall(r"\bspecdec_\w+", expression))


def test_shape(dashboard):
    assert dashboard["uid"] == "specdec"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    (variable,) = dashboard["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    for panel in panels(dashboard):
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"] == [
        "Throughput",
        "Latency",
        "Acceptance",
    ]


def test_panels_lie_beside_each_other(dashboard):
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < ROW_WIDTH
        assert not taken & cells
        taken |= cells


def test_each_expression_uses_known_metrics_and_every_metric_is_shown(dashboard):
    used = [names(expression) for expression in expressions(dashboard)]
    assert all(used)
    assert set.union(*used) == SERIES


def test_counters_are_read_as_rates_and_gauges_as_they_are(dashboard):
    for expression in expressions(dashboard):
        assert expression.count("(") == expression.count(")")
        for name in names(expression):
            is_rate = re.search(rf"rate\({name}\[\$__rate_interval\]\)", expression) is not None
            assert is_rate == (name not in GAUGES)


def test_histograms_keep_their_buckets(dashboard):
    quantiles = [expression for expression in expressions(dashboard) if "_bucket" in expression]
    assert len(quantiles) == 3 * len(HISTOGRAMS)
    for expression in quantiles:
        assert re.fullmatch(
            r"histogram_quantile\(0\.\d+, sum by \(le\) \(rate\(\w+\[\$__rate_interval\]\)\)\)", expression
        )


def test_positions_stay_apart(dashboard):
    (expression,) = [expression for expression in expressions(dashboard) if "per_pos" in expression]
    assert expression.startswith("sum by (position) (rate(")
