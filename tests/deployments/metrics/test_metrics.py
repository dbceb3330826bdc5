"""What a replica counts, in Prometheus' form, and how it is handed on to Ray's exporter."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget
from deployments.http.observer import Observer
from deployments.metrics.families import FAMILIES, REPORTED, Family, metrics_table, register
from deployments.metrics.page import ChangeRegistry
from deployments.metrics.replica import MachineMetrics, RayExport, ReplicaMetrics
from specdec.drafting.controller import Controller
from specdec.drafting.modes import MODES, Bounds
from specdec.engine.timing import StepMetrics
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class RayMetric:
    """Stands for one of Ray's metrics: keeps what was recorded, and refuses what Ray refuses."""

    def __init__(self, samples: Samples, name: str, text: str, tag_keys: tuple[str, ...]) -> None:
        self.samples, self.name, self.tag_keys = samples, name, tag_keys

    def _key(self, tags: Mapping[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
        assert set(tags) == set(self.tag_keys)
        return self.name, frozenset(tags.items())

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.samples[self._key(tags)] = value

    def inc(self, value: float, tags: Mapping[str, str]) -> None:
        assert value > 0
        self._record(value, tags)

    def _record(self, value: float, tags: Mapping[str, str]) -> None:
        key = self._key(tags)
        self.samples[key] = self.samples.get(key, 0.0) + value


class RayKinds:
    """Stands for ``ray.serve.metrics``."""

    def __init__(self) -> None:
        self.samples: Samples = {}
        self.num_calls = 0

    def _make(self, name: str, text: str, tag_keys: tuple[str, ...]) -> RayMetric:
        self.num_calls += 1
        return RayMetric(self.samples, name, text, tag_keys)

    Counter = Gauge = _make

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]


def test_a_report_is_shown_by_the_names_of_its_part() -> None:
    registry, machine = CollectorRegistry(), MachineMetrics("target", "m")
    registry.register(machine)
    machine.metrics = {
        "num_sequences": 2.0,
        "busy_s": 1.5,
        "decode_steps/1/8": 7.0,
        "num_refused/draining": 1.0,
        "step/0/rows": 9.0,
        "num_sessions": 4.0,
    }
    assert registry.get_sample_value("specdec_worker_sequences", {"model_name": "m"}) == 2
    assert registry.get_sample_value("specdec_busy_seconds_total", {"model_name": "m"}) == 1.5
    labels = {"model_name": "m", "rows": "1", "tokens": "8"}
    assert registry.get_sample_value("specdec_decode_steps_total", labels) == 7
    refusals = {"model_name": "m", "reason": "draining"}
    assert registry.get_sample_value("specdec_worker_refusals_total", refusals) == 1
    assert {metric.name for metric in registry.collect()} == {
        "specdec_worker_sequences",
        "specdec_busy_seconds",
        "specdec_decode_steps",
        "specdec_worker_refusals",
    }, "what is for the controller, or another part's, is not shown"


def test_machines_report_what_the_list_names() -> None:
    """Every figure of the list is reported by some machine, but for those that only real or emulated backends have."""
    script = Script(0.8, 0.9, range(5, 50))
    target = TargetMachine("T#1", ScriptedTarget(script, 100), Times())
    draft = DrafterMachine("D#1", ScriptedDrafter(script, 100), Times())
    controller = Controller(Bounds(4, 4, frozenset(MODES)))
    router = RouterMachine("R#1", controller, Times())
    router.worker_joined("T#1", "target", 0.0)
    router.worker_lost("T#1", 1.0)
    ingress = IngressMachine("I#1", Times())
    reported = {
        "target": target.metrics() | StepMetrics().metrics(),
        "draft": draft.metrics() | StepMetrics().metrics(),
        "router": router.metrics(),
        "ingress": ingress.metrics(),
    }
    names = {part: {figure.partition("/")[0] for figure in report} for part, report in reported.items()}
    by_events = {"decode_steps", "decode_step_s", "num_resyncs", "num_refused", "num_config_errors", "num_workers"}
    by_backends = {"kv_cache_usage_perc", "num_evictions", "num_reused_tokens", "num_reread_tokens", "num_fallbacks"}
    by_replicas = {"loop_lag_s", "loop_busy_share", "exposed_draft_share", "min_workers"}
    counts = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    by_events |= {f"{name}_by_source" for name in counts}
    by_backends |= {"backend", "num_forbidden_draft_tokens", "num_failed_draft_steps"}
    by_backends |= {"num_loaded_adapters", "num_adapter_loads", "executor_recorded"}
    by_replicas |= {"slots_used_share", "num_waiting_requests", "num_requests_refused", "longest_queue_s"}
    by_replicas |= {"draft_failed"}
    by_groups = {"measured_gain"}
    for family in REPORTED:
        if not family.figure.startswith(("kv_", "state_", "num_state")) and family.figure not in (
            by_events | by_backends | by_groups | by_replicas
        ):
            assert {part for part in family.parts if family.figure in names[part]} == set(family.parts), family.name
    assert router.metrics()["num_worker_deaths/target"] == 1


def test_names_and_words() -> None:
    names = [family.series for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch(r"[A-Z0-9][^.]*\.", family.text), family
        assert len(family.text.split()) >= 4, family
        assert not family.name.endswith(("_total", "_s", "_ms", "_bucket", "_sum", "_count"))
        assert (family.kind == "histogram") == bool(family.buckets)


def test_a_metric_is_added_from_outside() -> None:
    fan = Family("fan_speed", "gauge", "Turns of the fan in a second.", figure="fan_speed", parts=("target",))
    register(fan)
    try:
        shown = {}
        for part in ("target", "draft"):
            machine = MachineMetrics(part, "m")
            machine.metrics = {"fan_speed": 3.0}
            shown[part] = [(metric.name, sample.value) for metric in machine.collect() for sample in metric.samples]
        assert shown == {"target": [("specdec_fan_speed", 3.0)], "draft": []}
        with pytest.raises(ValueError, match="there is a metric of the name specdec_fan_speed"):
            register(fan)
    finally:
        REPORTED.remove(fan)


def test_the_table_is_that_of_the_code() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/metrics.md").read_text(encoding="utf-8")
    hint = "run: python -m deployments.metrics.families docs/metrics.md"
    assert text.endswith("\n".join(metrics_table()) + "\n"), hint


def test_what_has_grown_is_handed_on_once_and_every_gauge_each_time() -> None:
    registry, ray = CollectorRegistry(), RayKinds()
    counter = Counter("specdec_tokens", "Tokens.", ["key"], registry=registry)
    gauge = Gauge("specdec_running", "Running.", registry=registry)
    histogram = Histogram("specdec_wait_seconds", "Wait.", buckets=(0.1, 1.0), registry=registry)
    export = RayExport(ray)
    counter.labels("a").inc(0)
    gauge.set(3)
    export.hand_on(registry.collect())
    assert ray.value("specdec_tokens", key="a") == 0, "a series is there before its first event"
    counter.labels("a").inc(5)
    for seconds in (0.05, 0.5, 5.0):
        histogram.observe(seconds)
    for _ in range(2):
        ray.samples.pop(("specdec_running", frozenset()))
        export.hand_on(registry.collect())
    assert ray.value("specdec_tokens", key="a") == 5
    assert ray.value("specdec_running") == 3
    buckets = {le: ray.value("specdec_wait_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")}
    assert buckets == {"0.1": 1, "1.0": 2, "+Inf": 3}
    assert ray.value("specdec_wait_seconds_sum") == pytest.approx(5.55)
    assert ray.value("specdec_wait_seconds_count") == 3
    assert not any(name.endswith("_created") for name, _ in ray.samples)


def test_only_the_series_by_key_that_have_changed_are_handed_on() -> None:
    registry, ray = ChangeRegistry(), RayKinds()
    observer, export = Observer(registry, "m"), RayExport(ray)

    def handed_on() -> set[str]:
        families = list(registry.changes())
        export.hand_on(families)
        return {sample.labels["key"] for family in families for sample in family.samples if "key" in sample.labels}

    for key in ("a", "b", "c"):
        observer.opened("m", key, 0.0).closed("abort")
    assert handed_on() == {"a", "b", "c"}
    observer.prompt_tokens("m", "b", 7)
    changes = registry.changes()
    while next(changes).name != "specdec_prompt_tokens":
        pass
    changes.close()  # as where Ray takes no metrics
    assert handed_on() == {"b"}, "what could not be handed on is told again"
    assert handed_on() == set()
    assert ray.value("specdec_prompt_tokens", model_name="m", key="b") == 7
    assert ray.value("specdec_request_success", model_name="m", key="c", finished_reason="abort") == 1
    assert {"a", "c"} < {one.labels.get("key") for family in registry.collect() for one in family.samples}


async def test_a_machine_in_a_long_step_shows_the_figures_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.metrics.replica.PATIENCE_S", 0.01)
    is_busy = False

    async def ask() -> Mapping[str, float]:
        if is_busy:
            await asyncio.Event().wait()
        return {"num_steps": 4.0}

    metrics = ReplicaMetrics("target", "m", ask)
    first = await metrics.page()
    is_busy = True
    assert await metrics.page() == first
    assert b'specdec_steps_total{model_name="m"} 4.0' in first


async def test_what_cannot_be_handed_on_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deployments.metrics.replica.PERIOD_S", 0.001)
    handed_on = asyncio.Event()

    class Failing(RayExport):
        num_calls = 0

        def hand_on(self, families: Any) -> None:
            self.num_calls += 1
            if self.num_calls == 1:
                raise RuntimeError("no exporter")
            handed_on.set()

    async def ask() -> Mapping[str, float]:
        return {}

    metrics = ReplicaMetrics("router", "m", ask)
    metrics.start(Failing(RayKinds()))
    async with asyncio.timeout(10):
        await handed_on.wait()
    metrics.close()
