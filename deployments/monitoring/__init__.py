"""Dashboards, recording rules and alerts over the service's metrics, as ``specdec render --monitoring`` writes them."""

from __future__ import annotations

from importlib.resources import files as folder
from typing import Any

import yaml

from deployments.monitoring import resources, service, speculation
from deployments.monitoring.dashboards import dashboard_json
from deployments.monitoring.rules import manifest, rules_file

BOARDS = (service.BOARD, speculation.BOARD, resources.BOARD)
HEAD = "# Written by: specdec render --monitoring\n"
RELEASE = {"release": "prometheus"}
"""kube-prometheus-stack selects what carries the name of its release."""


def files() -> dict[str, str]:
    """The text of each file, by its path in the folder that is written."""
    here = folder(__package__)
    dashboards = {f"{board.name}.json": dashboard_json(board) for board in BOARDS}
    scraping = {name: (here / name).read_text() for name in ("prometheus.yml", "prometheus-laptop.yml")}
    objects = [(here / "podmonitor.yaml").read_text(), _yaml(manifest(RELEASE)), _yaml(_config_map(dashboards))]
    return {
        **{f"dashboards/{name}": text for name, text in dashboards.items()},
        **scraping,
        "rules.yml": HEAD + _yaml(rules_file()),
        "kubernetes.yaml": HEAD + "---\n".join(objects),
    }


def _config_map(dashboards: dict[str, str]) -> dict[str, Any]:
    """The dashboards as the Grafana of kube-prometheus-stack loads them: it looks for the label."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "specdec-dashboards", "labels": {**RELEASE, "grafana_dashboard": "1"}},
        "data": dashboards,
    }


def _yaml(content: dict[str, Any]) -> str:
    return yaml.dump(content, Dumper=_Readable, sort_keys=False, width=118, allow_unicode=True)


class _Readable(yaml.SafeDumper):
    """Writes a text of several lines as it is."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """A block for several lines."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Readable.add_representer(str, _Readable.represent_str)
