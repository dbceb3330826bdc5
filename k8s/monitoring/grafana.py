"""Grafana's form of a dashboard, by its own builders, which know the schema."""

from __future__ import annotations

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from k8s.monitoring.charts import CHOSEN_MODEL, Board, Chart

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "specdec"
CHARTS_A_ROW = 3
ROW_WIDTH = 24
HEIGHT = 8


def dashboard_json(board: Board) -> str:
    """The dashboard as Grafana imports it."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"specdec-{board.name}")
        .description(board.text)
        .tags([TAG])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .link(dashboard.DashboardLink("specdec").tags([TAG]).as_dropdown(False).include_vars(True).keep_time(True))
    )
    for variable in _variables():
        built.with_variable(variable)
    number = 0
    for title, charts in board.rows.items():
        number += 1
        built.with_row(dashboard.Row(title).id(number))
        for chart in charts:
            number += 1
            built.with_panel(_panel(chart, number))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _panel(chart: Chart, number: int) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .id(number)
        .title(chart.title)
        .description(chart.text)
        .unit(chart.unit)
        .datasource(SOURCE)
        .height(HEIGHT)
        .span(ROW_WIDTH // CHARTS_A_ROW)
        .fill_opacity(8)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if chart.unit == "percentunit":
        panel.min(0).max(1)
    for index, (legend, query) in enumerate(chart.queries.items()):
        panel.with_target(
            prometheus.Dataquery()
            .expr(query)
            .legend_format(legend)
            .ref_id(chr(ord("A") + index))
            .range()
            .datasource(SOURCE)
        )
    return panel


def _variables() -> list[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _choice("namespace", "Namespace", "label_values(specdec_is_draining, namespace)"),
        _choice("model", "Model", 'label_values(specdec_is_draining{namespace=~"$namespace"}, model_name)'),
        _choice("replica", "Replica", f"label_values(specdec_is_draining{{{CHOSEN_MODEL}}}, replica)"),
    ]


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A variable of which some, or all, values are chosen; All takes series without the label, too."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )
