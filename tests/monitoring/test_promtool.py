"""What Prometheus' own tool says: configurations, rules, every query, and alerts on made-up series."""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.alert_cases import CASES, WHOSE, Case
from tests.k8s.test_monitoring import ALERTS, DASHBOARDS, FILES, queries


def promtool(*arguments: object) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-laptop.yml"])
def test_configurations(name: str, tmp_path: Path) -> None:
    for file in (name, "rules.yml"):
        (tmp_path / file).write_text(FILES[file])
    promtool("check", "config", tmp_path / name)


def test_every_query_is_understood(tmp_path: Path) -> None:
    asked = [query for dashboard in DASHBOARDS.values() for query in queries(dashboard)]
    rules = [{"record": f"query_{i}", "expr": query.replace("$__rate_interval", "1m")} for i, query in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yml")


def test_every_alert_fires_and_clears(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(FILES["rules.yml"])
    tests = tmp_path / "tests.yml"
    tests.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(rules)],
                "evaluation_interval": "1m",
                "tests": [group(number, case) for number, case in enumerate(CASES)],
            }
        )
    )
    promtool("test", "rules", tests)


def group(number: int, case: Case) -> dict[str, Any]:
    """A case as promtool takes it."""
    expected = [(case.clears, [])] if case.fires is None else [(case.fires, [fired(case)]), (case.clears, [])]
    return {
        "name": f"{number}: {asdict(case)}",
        "interval": "1m",
        "input_series": [{"series": with_labels(name), "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": alerts} for minute, alerts in expected
        ],
    }


def fired(case: Case) -> dict[str, Any]:
    rule = ALERTS[case.alert]
    whose = {} if case.is_of_none else {key: WHOSE[key] for key in ("namespace", "application")}
    labels = whose | case.labels | rule["labels"]
    return {"exp_labels": labels, "exp_annotations": rule["annotations"]}


def with_labels(name: str) -> str:
    """The series with the labels that every series has, where it has none of the name itself."""
    whose = ", ".join(f'{key}="{value}"' for key, value in WHOSE.items() if f"{key}=" not in name)
    return re.sub(r"{(.*)}", lambda own: "{" + ", ".join(filter(None, [own[1], whose])) + "}", name)
