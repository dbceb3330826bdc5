"""The metrics page of the whole service: what each replica tells, put together.

Counters with many series, of which few change in a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from deployments.metrics.families import PREFIX, Family

_HEAD = b"# All live replicas. Ray's exporters have the same series: scrape those or this page, never both.\n"


class ReplicaPage(NamedTuple):
    """What one replica tells, in Prometheus' text format, and whose it is."""

    application: str
    deployment: str
    replica: str
    text: bytes


def metrics_page(pages: Sequence[ReplicaPage], failures: Mapping[str, int]) -> bytes:
    """The page in Prometheus' text format.

    Every sample has the labels that Ray's exporter gives it, so that queries are the same for both, sums over replicas
    add up, and a replica that starts again from 0 is a counter's reset and nothing else.

    Args:
        pages: Of the replicas that answered.
        failures: Times that a replica did not answer, by deployment.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(pages))
    registry.register(_Failures(failures))
    text: bytes = generate_latest(registry)
    return _HEAD + text


class _Merged(Collector):
    """Each family once, with the samples of all replicas."""

    def __init__(self, pages: Sequence[ReplicaPage]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for page in self._pages:
            whose = {"application": page.application, "deployment": page.deployment, "replica": page.replica}
            for family in text_string_to_metric_families(page.text.decode()):
                if family.name.endswith("_created"):  # of a counter or histogram; Ray's exporter has none
                    continue
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, sample.labels | whose, sample.value)
        return families.values()


class _Failures(Collector):
    def __init__(self, failures: Mapping[str, int]) -> None:
        self._failures = failures

    def collect(self) -> Iterable[Metric]:
        text = "Times that a replica did not answer when its figures were asked for."
        family = CounterMetricFamily("specdec_scrape_failures", text, labels=["deployment"])
        for deployment, count in self._failures.items():
            family.add_metric([deployment], count)
        return [family]


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
