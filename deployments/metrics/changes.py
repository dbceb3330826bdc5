"""Counters with many series, of which few change in a second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.metrics.families import PREFIX, Family


class ChangeCounter(Collector):
    """A counter that knows which of its series have changed, so that telling of these costs nothing for the others."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._values: dict[tuple[str, ...], float] = {}
        self._changed: set[tuple[str, ...]] = set()

    def inc(self, *labels: str, by: float = 1.0) -> None:
        """Count, by the model's name and the family's labels. With ``by=0`` the series exists from now on."""
        self._values[labels] = self._values.get(labels, 0.0) + by
        self._changed.add(labels)

    def collect(self) -> Iterator[Metric]:
        """All series."""
        yield self._metric(self._values)

    def changes(self) -> Iterator[Metric]:
        """The series that have changed since the last call whose result was read to its end."""
        yield self._metric(self._changed)
        self._changed.clear()

    def _metric(self, series: Iterable[tuple[str, ...]]) -> Metric:
        family = self._family
        metric = CounterMetricFamily(PREFIX + family.name, family.text, labels=("model_name", *family.labels))
        for labels in series:
            metric.add_metric(labels, self._values[labels])
        return metric


class ChangeRegistry(CollectorRegistry):
    """A registry that can leave out the series of a :class:`ChangeCounter` that have not changed."""

    def __init__(self) -> None:
        super().__init__()
        self._collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """Add a collector."""
        super().register(collector)
        self._collectors.append(collector)

    def changes(self) -> Iterator[Metric]:
        """Every family that others have, and what has changed of the rest."""
        for collector in self._collectors:
            yield from collector.changes() if isinstance(collector, ChangeCounter) else collector.collect()
