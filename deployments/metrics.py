"""The service's metrics page: what this ingress counted, and what the workers last reported."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specdec.protocol.router import WorkerKind

logger = logging.getLogger("ray.serve")

_PATIENCE_S = 2.0
Reports = dict[str, tuple[WorkerKind, dict[str, float]]]


async def metrics_page(registry: CollectorRegistry, router: Any, model_name: str) -> bytes:
    """The page in Prometheus' text format.

    Args:
        registry: Of this ingress.
        router: Handle of the routers, which know the workers' newest reports.
        model_name: Label of every sample.
    """
    own: bytes = generate_latest(registry)
    reports: Reports = {}
    try:
        for answer in await asyncio.wait_for(router.broadcast("reports").results_async(), _PATIENCE_S):
            reports.update(answer)
    except Exception as error:  # a router that dies or hangs must not cost this ingress' own counters
        logger.warning("The workers' figures are missing from this scrape: %r", error)
    workers = CollectorRegistry()
    workers.register(_WorkerReports(reports, model_name))
    theirs: bytes = generate_latest(workers)
    return own + theirs


class _WorkerReports(Collector):
    """What workers report, as gauges labelled by worker."""

    def __init__(self, reports: Reports, model_name: str) -> None:
        self._reports = reports
        self._model_name = model_name

    def collect(self) -> list[GaugeMetricFamily]:
        """One family per figure."""
        labels = ["model_name", "role", "worker"]
        families: dict[str, GaugeMetricFamily] = {}
        for name, text in _GAUGES.items():
            families[name] = GaugeMetricFamily(f"specdec_{name}", text, labels=labels)
        text = "Sequences that ran without speculation since the worker started."
        fallbacks = GaugeMetricFamily("specdec_num_fallbacks", text, labels=[*labels, "reason"])
        for worker, (kind, report) in sorted(self._reports.items()):
            for name, family in families.items():
                if name in report:
                    family.add_metric([self._model_name, kind, worker], report[name])
            for name, figure in report.items():
                what, _, reason = name.partition("/")
                if what == "num_fallbacks":
                    fallbacks.add_metric([self._model_name, kind, worker, reason], figure)
        return [*families.values(), fallbacks]


_GAUGES = {
    "num_sequences": "Sequences that a worker holds.",
    "kv_cache_usage_perc": "Share of a worker's cache blocks that sequences hold, from 0 to 1.",
    "kv_blocks_in_use": "Cache blocks that sequences hold.",
    "state_slots_in_use": "Recurrent states that sequences and branches hold.",
}
