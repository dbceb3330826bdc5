"""What a dashboard is made of: charts in rows, and queries over the series that the reader has chosen."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.metrics.families import FAMILIES, Family

CHOSEN_MODEL = 'namespace=~"$namespace", model_name=~"$model"'
CHOSEN = f'{CHOSEN_MODEL}, replica=~"$replica"'
"""Picks what the variables say; a variable set to All also takes series that lack its label."""
WINDOW = "[$__rate_interval]"
TOKENS_PER_S = "suffix: tokens/s"
WORKER = "deployment, replica"
WHOSE = "{{deployment}} {{replica}}"
TARGETS, DRAFTERS = 'deployment="TargetServer"', 'deployment="DraftServer"'


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel that plots time series.

    Attributes:
        title: Above it.
        text: What it shows, one sentence.
        unit: By Grafana's name.
        queries: Queries by the legend of their lines.
    """

    title: str
    text: str
    unit: str
    queries: dict[str, str]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard.

    Attributes:
        name: ``specdec-<name>`` is its address in Grafana.
        title: Its title.
        text: Whom it is for.
        rows: Charts by the title of their row.
    """

    name: str
    title: str
    text: str
    rows: dict[str, tuple[Chart, ...]]


def named(name: str) -> Family:
    """A family by its name without the prefix."""
    (family,) = [family for family in FAMILIES if family.name == name]
    return family


def chosen(family: Family, *matches: str) -> str:
    """The chosen series of a family."""
    return f"{family.series}{{{', '.join([CHOSEN, *matches])}}}"


def rate(family: Family, by: str = "", *matches: str) -> str:
    """Increase of a counter per second, summed over replicas, or by labels."""
    return f"sum{_by(by)} (rate({chosen(family, *matches)}{WINDOW}))"


def rare(family: Family, by: str = "", *matches: str) -> str:
    """The same of what may never have happened: 0 where there is no series."""
    return f"{rate(family, by, *matches)} or on() vector(0)"


def total(family: Family, by: str = "", *matches: str) -> str:
    """A gauge, summed over replicas, or by labels."""
    return f"sum{_by(by)} ({chosen(family, *matches)})"


def mean(family: Family, by: str = "", *matches: str) -> str:
    """A gauge's mean over replicas, or by labels."""
    return f"avg{_by(by)} ({chosen(family, *matches)})"


def ratio(part: Family, whole: Family, by: str = "") -> str:
    """One counter's increase over another's; nothing while the other stands still."""
    return f"{rate(part, by)} / ({rate(whole, by)} > 0)"


def quantiles(family: Family) -> dict[str, str]:
    """Three quantiles of a histogram."""
    buckets = f"sum by (le) (rate({family.series}_bucket{{{CHOSEN}}}{WINDOW}))"
    return {f"{share:.0%}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.9, 0.99)}


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
