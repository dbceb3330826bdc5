"""What one replica counts: a registry, the figures of its machine beside it, and both handed on to Ray's exporter."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from ray import serve
from ray.serve import metrics as ray_metrics

from deployments.metrics.autoscaling import Load, Metrics, load_of
from deployments.metrics.families import PREFIX, REPORTED, Family, Part
from deployments.metrics.page import ChangeRegistry, ReplicaPage
from deployments.transport.endpoints import Endpoint, replica_id

logger = logging.getLogger("ray.serve")

PERIOD_S = 1.0
"""How often a replica hands on what it has counted."""
PATIENCE_S = 1.0
"""How long a scrape waits for a machine in a long step, before it shows the figures of before."""

Ask = Callable[[], Awaitable[Metrics]]
"""Asks the machine for its metrics."""


class MachineMetrics(Collector):
    """The newest metrics of a replica's machine, for Prometheus.

    Args:
        part: Whose it is: only that part's families are shown.
        model_name: Label of every sample.
    """

    def __init__(self, part: Part, model_name: str) -> None:
        self._families = [family for family in REPORTED if part in family.parts]
        self._model_name = model_name
        self.metrics: Metrics = {}

    def collect(self) -> Iterator[Metric]:
        """One family per figure that was reported."""
        parts: dict[str, dict[tuple[str, ...], float]] = {}
        for figure, value in self.metrics.items():
            name, *labels = figure.split("/")
            parts.setdefault(name, {})[tuple(labels)] = value
        for family in self._families:
            samples = parts.get(family.figure)
            if samples is not None:
                yield self._metric(family, samples)

    def _metric(self, family: Family, samples: Mapping[tuple[str, ...], float]) -> Metric:
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = kind(f"{PREFIX}{family.name}", family.text, labels=("model_name", *family.labels))
        for labels, value in samples.items():
            metric.add_metric((self._model_name, *labels), value)
        return metric


class ReplicaMetrics:
    """The metrics of one replica.

    Args:
        part: Whose they are.
        model_name: Label of every sample of the machine's metrics.
        ask: Asks the machine for its metrics.

    Attributes:
        load: What the replica had to do within the last second.
    """

    def __init__(self, part: Part, model_name: str, ask: Ask) -> None:
        self.registry = ChangeRegistry()
        self.load = Load()
        self._part = part
        self._ask = ask
        self._loop: Metrics = {}
        self._machine = MachineMetrics(part, model_name)
        self.registry.register(self._machine)
        self._task: asyncio.Task[None] | None = None
        self._has_failed = False

    def start(self, export: RayExport | None = None) -> None:
        """Hand on to Ray's exporter what is counted, once a second; on the event loop, in a replica."""
        self._export = export or RayExport()
        self._task = asyncio.create_task(self._hand_on(self._export))

    def close(self) -> None:
        """Hand on what is left, and nothing any more."""
        if self._task is not None:
            self._task.cancel()
            self._try(self._export)

    async def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        await self._refresh()
        text: bytes = generate_latest(self.registry)
        return text

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                self._machine.metrics = {**await self._ask(), **self._loop}
        except Exception as error:  # a machine in a long step, or one that has failed
            logger.debug("The machine's metrics are those of before: %r", error)

    async def _hand_on(self, export: RayExport) -> None:
        began_s, cpu_s, before = time.monotonic(), time.thread_time(), self._machine.metrics
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(PERIOD_S)
            now_s, now_cpu_s = time.monotonic(), time.thread_time()
            self._loop = {
                "loop_lag_s": now_s - slept_s - PERIOD_S,
                "loop_busy_share": (now_cpu_s - cpu_s) / (now_s - began_s),
            }
            await self._refresh()
            self.load = load_of(self._part, self._machine.metrics, before, now_s - began_s)
            began_s, cpu_s, before = now_s, now_cpu_s, self._machine.metrics
            self._try(export)

    def _try(self, export: RayExport) -> None:
        """Metrics stop nothing: what cannot be handed on is tried again the next time, and logged once."""
        try:
            export.hand_on(self.registry.changes())
        except Exception:
            logger.log(logging.DEBUG if self._has_failed else logging.ERROR, "Ray takes no metrics", exc_info=True)
            self._has_failed = True


class RayExport:
    """Hands samples to ``ray.serve.metrics``, whose exporter on each node Prometheus scrapes.

    A histogram's buckets, sum and count are handed on as counters. Ray's own histograms would take a call for each
    observation, and rebuild their sums from the middles of their buckets.

    Args:
        kinds: Where counters and gauges come from.
    """

    def __init__(self, kinds: Any = ray_metrics) -> None:
        self._kinds = kinds
        self._metrics: dict[str, Any] = {}
        self._exported: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def hand_on(self, families: Iterable[Metric]) -> None:
        """Hand on what has changed since the last call, and every gauge: one that is reported no more is forgotten."""
        for family in families:
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                if family.type == "gauge":
                    self._metric("Gauge", sample.name, family, sample.labels).set(sample.value, dict(sample.labels))
                else:
                    self._count(sample.name.removesuffix("_total"), family, sample.labels, sample.value)

    def _count(self, name: str, family: Metric, labels: Mapping[str, str], value: float) -> None:
        key = name, tuple(sorted(labels.items()))
        before = self._exported.get(key)
        if before == value:
            return
        counter = self._metric("Counter", name, family, labels)
        if before is None and not value:
            counter._record(0.0, dict(labels))  # ``inc`` takes no zero, and what begins at 0 has an increase later
        elif value > (before or 0.0):
            counter.inc(value - (before or 0.0), dict(labels))
        self._exported[key] = value

    def _metric(self, kind: str, name: str, family: Metric, labels: Mapping[str, str]) -> Any:
        metric = self._metrics.get(name)
        if metric is None:
            metric = getattr(self._kinds, kind)(name, family.documentation, tag_keys=tuple(sorted(labels)))
            self._metrics[name] = metric
        return metric


class Measured(Endpoint):
    """An end of links that tells what it has counted: by itself to Ray's exporter, and to whoever asks."""

    _replica_metrics: ReplicaMetrics

    def start_metrics(self, metrics: ReplicaMetrics) -> None:
        """Count from now on, until the links end."""
        self._replica_metrics = metrics
        metrics.start()
        self._closers.append(metrics.close)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what this replica reports to its autoscaler, where the number of replicas is a range."""
        return asdict(self._replica_metrics.load)

    async def metrics_page(self) -> ReplicaPage:
        """What this replica has counted."""
        context = serve.get_replica_context()
        return ReplicaPage(context.app_name, context.deployment, replica_id(), await self._replica_metrics.page())
