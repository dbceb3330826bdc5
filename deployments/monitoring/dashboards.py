"""A Grafana dashboard; a test reads each one with Grafana's own library, which knows the schema."""

from __future__ import annotations

import json
from typing import Any

from deployments.monitoring.charts import CHOSEN_MODEL, Board, Chart

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAG = "specdec"
CHARTS_A_ROW = 3
ROW_WIDTH = 24
HEIGHT = 8
SCHEMA_VERSION = 36
"""Of Grafana 9; newer ones migrate it as they load it."""


def dashboard_json(board: Board) -> str:
    """The dashboard as Grafana imports it."""
    built = {
        "uid": f"specdec-{board.name}",
        "title": board.title,
        "description": board.text,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # a cursor in all charts
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "links": [_link()],
        "templating": {"list": _variables()},
        "panels": _panels(board),
    }
    return json.dumps(built, indent=1) + "\n"


def _link() -> dict[str, Any]:
    """To the other dashboards, with what the reader has chosen."""
    return {"type": "dashboards", "title": "specdec", "tags": [TAG], "includeVars": True, "keepTime": True}


def _panels(board: Board) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, charts in board.rows.items():
        place = {"x": 0, "y": top, "w": ROW_WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        top += 1
        for index, chart in enumerate(charts):
            row, column = divmod(index, CHARTS_A_ROW)
            width = ROW_WIDTH // CHARTS_A_ROW
            place = {"x": column * width, "y": top + row * HEIGHT, "w": width, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_chart(chart)})
        top += -(-len(charts) // CHARTS_A_ROW) * HEIGHT
    return panels


def _chart(chart: Chart) -> dict[str, Any]:
    bounds = {"min": 0, "max": 1} if chart.unit == "percentunit" else {}
    return {
        "type": "timeseries",
        "title": chart.title,
        "description": chart.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": chart.unit, "custom": {"fillOpacity": 8}, **bounds}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "asc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "range": True,
                "instant": False,
            }
            for index, (legend, query) in enumerate(chart.queries.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
        _choice("namespace", "Namespace", "label_values(specdec_is_draining, namespace)"),
        _choice("model", "Model", 'label_values(specdec_is_draining{namespace=~"$namespace"}, model_name)'),
        _choice("replica", "Replica", f"label_values(specdec_is_draining{{{CHOSEN_MODEL}}}, replica)"),
    ]


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    """A variable of which some, or all, values are chosen; All takes series without the label, too."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "query": query,
        "datasource": SOURCE,
        "refresh": 2,  # when the time range changes
        "sort": 1,  # by the alphabet
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }
