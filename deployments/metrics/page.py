"""The metrics page of the whole service: what each replica tells, put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

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
