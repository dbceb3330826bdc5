"""How many replicas there should be, and what Serve is told and given for it."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from ray import cloudpickle
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, HandleMetricReport, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo

from cluster.config.app import AppArgs
from cluster.config.limits import Limits
from cluster.config.replicas import ReplicaRange
from deployments.app import replica_options
from deployments.http.admission import Admission
from deployments.http.errors import ApiError
from deployments.http.observer import Observer
from deployments.ingress import OpenAIIngress
from deployments.metrics.autoscaling import (
    BUSY,
    FULL,
    LONG_QUEUE_S,
    USERS_WAIT,
    Autoscaler,
    ExposedDrafts,
    Load,
    desired_replicas,
    load_of,
)
from deployments.metrics.replica import ReplicaMetrics


def desired(part: str, loads: list[Load], sequences: float | None = None, limit: float = math.inf) -> int:
    return desired_replicas(part, loads, sequences, limit)[0]


@pytest.mark.parametrize(
    ("loads", "sequences", "expected"),
    [
        ([Load()], None, 1),
        ([Load(8, 0, FULL)], None, 1),
        ([Load(8, 0, FULL + 0.01)], None, 2),
        ([Load(20, 4, 1.0)], None, 2),
        ([Load(20, 10, 1.0)], None, 3),
        ([Load(3, 3, 0.0)], None, 4),
        ([Load(8, 0, 0.7), Load(8, 0, 0.7), Load(2, 0, 0.1)], None, 3),
        ([Load(8, 0, 0.5), Load(8, 0, 0.5), Load(2, 0, 0.1)], None, 2),
        ([Load(8, 0, 0.1), Load()], None, 1),
        ([Load(8, 0, 0.1)], 4, 2),
        ([Load(9, 0, 0.1)], 4, 3),
        ([Load(4, 0, 0.1), Load()], 4, 2),
        ([Load(3, 0, 0.1), Load()], 4, 1),
        ([Load(4, 0, 0.9)], 8, 2),
    ],
)
def test_targets_have_room_for_what_they_hold_and_for_what_waits(
    loads: list[Load], sequences: float | None, expected: int
) -> None:
    assert desired("target", loads, sequences) == expected


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([Load()], 0),
        ([Load(0.2)], 0),
        ([Load(), Load(0.1, busy=0.9)], 0),
        ([Load(4, busy=0.9, late=0.04)], 1),
        ([Load(4, busy=0.9, late=0.06)], 2),
        ([Load(4, busy=0.1, late=0.2)], 1),
        ([Load(4, busy=0.9, late=0.2), Load(4, busy=0.5, late=0.2)], 3),
        ([Load(4, busy=0.5), Load(4, busy=0.5)], 2),
        ([Load(4, busy=BUSY / 2), Load(4, busy=BUSY / 2)], 1),
        ([Load(4), Load(4), Load(4)], 2),
    ],
)
def test_drafters_follow_the_time_that_late_drafts_cost(loads: list[Load], expected: int) -> None:
    assert desired("draft", loads) == expected


@pytest.mark.parametrize("part", ["router", "ingress"])
@pytest.mark.parametrize(
    ("loads", "sequences", "expected"),
    [
        ([Load()], None, 1),
        ([Load(100, busy=0.8, late=0.01)], None, 1),
        ([Load(100, busy=0.8, late=0.2)], None, 2),
        ([Load(100, busy=0.1, late=0.2)], None, 1),
        ([Load(100, busy=0.3), Load(100, busy=0.3)], None, 2),
        ([Load(), Load()], None, 1),
        ([Load(100)], 40, 3),
    ],
)
def test_loops_that_lag_are_relieved(part: str, loads: list[Load], sequences: float | None, expected: int) -> None:
    assert desired(part, loads, sequences) == expected


@pytest.mark.parametrize(
    ("part", "load", "expected"),
    [
        ("ingress", Load(256, used=0.7), 1),
        ("ingress", Load(256, used=1.0), 2),
        ("ingress", Load(256, used=3.0), 4),
        ("ingress", Load(9, users_wait=1), 2),
        ("target", Load(256, used=0.3, busy=1), 1),
        ("target", Load(256, used=0.3, busy=1, users_wait=1), 2),
        ("target", Load(256, used=0.3, busy=0.5, users_wait=1), 1),
        ("target", Load(256, used=0.3, busy=1, users_wait=USERS_WAIT / 2), 1),
        ("router", Load(256, busy=0.5, users_wait=1), 2),
        ("router", Load(256, busy=0.1, users_wait=1), 1),
    ],
)
def test_users_who_wait_get_more_of_what_may_help_them(part: str, load: Load, expected: int) -> None:
    assert desired(part, [load]) == expected


@pytest.mark.parametrize("part", ["target", "router"])
def test_replicas_that_users_waited_for_stay_until_the_load_is_less(part: str) -> None:
    number, limit = desired_replicas(part, [Load(40, busy=1, users_wait=1)])
    assert (number, limit) == (2, 40)
    for held, expected in ((40, 2), (31, 2), (30, 1)):
        assert desired_replicas(part, [Load(held / 2, busy=0.1)] * 2, limit=limit) == (expected, 40)
    assert desired_replicas(part, [Load(25, busy=1, users_wait=1)], limit=limit) == (2, 25)
    assert desired_replicas(part, [Load(50, busy=1)], limit=limit) == (1, 50), "it serves more, and nobody waits"


@pytest.mark.parametrize("part", ["target", "ingress"])
@pytest.mark.parametrize("num_users", [0, 10, 63, 64, 65, 100, 130, 200, 260])
def test_a_load_that_stays_starts_and_stops_no_replica_in_turn(part: str, num_users: int) -> None:
    """A replica serves up to 64 sequences, beyond which users wait: the number settles, and is enough."""
    count, limit, counts = 1, math.inf, []
    for _ in range(60):
        held = min(num_users, 64 * count) / count
        waits = float(num_users > 64 * count)
        used = num_users / count / 64 if part == "ingress" else 0.3
        loads = [Load(held, used=used, busy=0.3 + 0.7 * waits, users_wait=waits)] * count
        count, limit = desired_replicas(part, loads, limit=limit)
        count = min(count, 8)
        counts.append(count)
    settled = counts[10:]
    assert len(set(settled)) == 1, counts
    assert 64 * settled[0] >= num_users, counts
    assert settled[0] <= 1 + num_users / 48


def test_a_load_is_read_from_reports() -> None:
    report = {"num_sequences": 5.0, "num_waiting_sequences": 2.0, "kv_cache_usage_perc": 0.25, "busy_s": 9.0}
    assert load_of("target", report, {"busy_s": 8.0}, 2.0) == Load(5, 2, 0.25, busy=0.5)
    assert load_of("draft", report, {"busy_s": 8.0}, 2.0) == Load(5, busy=0.5)
    assert load_of("draft", report, {}, 2.0) == Load(5), "what was before is not known"
    loop = {"loop_lag_s": 0.1, "loop_busy_share": 0.7}
    assert load_of("router", loop | {"num_sessions": 3.0}, {}, 1.0) == Load(3, busy=0.7, late=0.1)
    ingress = loop | {"num_requests": 3.0, "slots_used_share": 0.5, "num_requests_refused": 4.0}
    assert load_of("ingress", ingress, ingress, 1.0) == Load(3, 0, 0.5, 0.7, 0.1)
    for change in ({"num_requests_refused": 5.0}, {"num_waiting_requests": 1.0}):
        assert load_of("ingress", ingress | change, ingress, 1.0).users_wait == 1


async def test_a_full_ingress_tells_that_users_wait() -> None:
    """The way of the figures: admission and observer, the ingress's report, its load, and what targets are told."""
    now_s = 10.0
    admission = Admission(Limits(max_concurrent_requests=2, max_queued_requests=1, max_share_per_key=1.0))
    observer = Observer(CollectorRegistry(), clock=lambda: now_s)
    parts = {"_machine": SimpleNamespace(metrics=dict), "_service": SimpleNamespace(is_draining=False)}
    server: Any = SimpleNamespace(_admission=admission, _observer=observer, config_metrics=dict, **parts)
    server._replica_metrics = ReplicaMetrics("ingress", "m", partial(OpenAIIngress._metrics, server))

    async def look() -> tuple[float, float]:
        metrics, before = server._replica_metrics, server._replica_metrics._machine.metrics
        await metrics._refresh()
        metrics.load = load_of("ingress", metrics._machine.metrics, before, 1.0)
        return metrics.load.used, await OpenAIIngress.users_wait(server)

    assert await look() == (0, 0)
    tickets = [admission.enter("k", 1) for _ in range(3)]
    await tickets[0].take(2)
    assert await look() == (1, 0)
    waiting = asyncio.create_task(tickets[1].take(1))
    await asyncio.sleep(0)
    assert await look() == (1.5, 1)
    with pytest.raises(ApiError):
        await tickets[2].take(1)
    tickets[0].leave()
    await waiting
    assert await look() == (0.5, 1), "one was refused"
    assert await look() == (0.5, 0)
    sequence = observer.opened("m", "k", 0.5)
    assert await look() == (0.5, 0)
    now_s += LONG_QUEUE_S
    assert await look() == (0.5, 1), "no target begins it"
    sequence.admitted()
    assert await look() == (0.5, 0)
    names = {metric.name for metric in server._replica_metrics.registry.collect()}
    assert {"specdec_slots_used_share", "specdec_slot_waiters", "specdec_requests_refused"} <= names


def test_exposed_draft_time() -> None:
    """20 late rounds, where a draft brings 3 tokens, beside 40 committed: 60 of 100 tokens came too late."""

    def report(late: float, committed: float) -> dict[str, float]:
        return {
            "num_late_rounds": late,
            "num_committed_tokens": committed,
            "num_drafts": 10.0,
            "num_accepted_tokens": 30.0,
        }

    exposed = ExposedDrafts()
    assert exposed.update({"T": report(100, 1000), "U": {}}, 0.0) == 0, "of long ago"
    assert exposed.update({"T": report(120, 1040)}, 1.0) == pytest.approx(0.6)
    assert exposed.update({"T": report(120, 1040)}, 1.2) == pytest.approx(0.6), "too soon to say anything new"
    assert exposed.update({"T": report(120, 1140)}, 2.2) == 0
    assert exposed.update({"T": report(1, 3), "U": report(9, 9)}, 3.2) == 0, "it has begun anew"
    fresh = {"num_late_rounds": 5.0, "num_committed_tokens": 5.0, "num_drafts": 0.0, "num_accepted_tokens": 0.0}
    exposed.update({"T": dict.fromkeys(fresh, 0.0)}, 4.2)
    assert exposed.update({"T": fresh}, 5.2) == pytest.approx(0.5), "a draft is taken to bring a token until one has"


def context(loads: dict[str, Load], running: list[str], target: int) -> Any:
    told: dict[str, dict[str, float]] = {}
    for replica, load in loads.items():
        for name, value in asdict(load).items():
            told.setdefault(name, {})[replica] = value
    return SimpleNamespace(
        aggregated_metrics=told, running_replicas=running, target_num_replicas=target, policy_state={}
    )


def policy_of(count: ReplicaRange, part: Any) -> Autoscaler:
    """As Serve's controller has it: from bytes, which must not need this project's other modules."""
    policy = replica_options(count, part)["autoscaling_config"].policy
    sent = cloudpickle.loads(policy.get_serialized_policy_def())
    made: Autoscaler = sent(**policy.policy_kwargs)
    return made


def test_serve_gets_a_policy_with_bounds_and_delays() -> None:
    assert replica_options(3, "target") == {"num_replicas": 3}
    assert replica_options(ReplicaRange(min=2, max=2), "target") == {"num_replicas": 2}
    count = ReplicaRange(min=0, max=4, sequences=4, upscale_delay_s=1, downscale_delay_s=2)
    config = replica_options(count, "draft")["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas, config.upscale_delay_s, config.downscale_delay_s) == (0, 4, 1, 2)
    policy = policy_of(count, "target")
    assert policy(context({"a": Load(9), "b": Load(8)}, ["a", "b"], 2))[0] == 5
    assert policy(context({"a": Load(9)}, ["a", "b"], 2))[0] == 3, "b has told nothing yet"
    assert policy(context({}, ["a"], 2)) == (2, {}), "nobody has told anything"
    assert policy_of(count, "draft")(context({}, [], 0)) == (0, {})
    assert policy(context({"a": Load(8, busy=1, users_wait=1)}, ["a"], 1)) == (2, {"limit": 8})
    assert policy(context({"a": Load(4, busy=1)}, ["a"], 2))[0] == 2, "the second one still starts, and is needed"


async def test_serve_is_told_what_a_replica_had_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.metrics.replica.PERIOD_S", 0.01)
    asked: list[float] = []

    async def ask() -> dict[str, float]:
        asked.append(float(len(asked)))
        return {"num_sessions": 7.0}

    metrics = ReplicaMetrics("router", "m", ask)
    metrics.start(SimpleNamespace(hand_on=list))  # type: ignore[arg-type]
    while len(asked) < 3:
        await asyncio.sleep(0.01)
    metrics.close()
    assert metrics.load.sequences == 7
    assert metrics.load.busy > 0
    names = {metric.name for metric in metrics.registry.collect()}
    assert {"specdec_loop_lag_seconds", "specdec_loop_busy_share"} <= names


def test_every_deployment_can_have_a_range() -> None:
    counts = {name: {"min": 1, "max": 3} for name in ("target", "draft", "router", "ingress")}
    args = AppArgs.model_validate({"replicas": counts})
    for part in ("target", "draft", "router", "ingress"):
        options = replica_options(getattr(args.replicas, part), part)  # type: ignore[arg-type]
        assert options["autoscaling_config"].max_replicas == 3


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
@pytest.mark.parametrize(
    ("part", "busy", "grown"), [("target", Load(16, 8, 1.0), 3), ("draft", Load(9, busy=0.9, late=0.3), 2)]
)
def test_serve_follows_the_policy_up_and_down_and_from_nothing(part: Any, busy: Load, grown: int) -> None:
    """Serve's own autoscaling state, as its controller has it, with no delays."""
    name = DeploymentID("D", "a")
    count = ReplicaRange(min=0, max=4, upscale_delay_s=0, downscale_delay_s=0)
    config = DeploymentConfig.from_proto_bytes(DeploymentConfig(**replica_options(count, part)).to_proto_bytes())
    state = DeploymentAutoscalingState(name)
    assert state.register(DeploymentInfo(config, None, 0, ""), 0) == 0
    assert state.get_decision_num_replicas(0) == 0, "nobody wants one"
    now_s = time.time()
    waiting = HandleMetricReport(name, "h", "", None, [TimeStampedValue(now_s - 1, 1.0)], {}, now_s)
    state.record_request_metrics_for_handle(waiting)
    assert state.get_decision_num_replicas(0) == 1, "a call waits"

    def told(*loads: Load) -> None:
        replicas = [ReplicaID(str(i), name) for i in range(len(loads))]
        state.update_running_replica_ids(replicas)
        for replica, load in zip(replicas, loads, strict=True):
            metrics = {key: [TimeStampedValue(time.time() - 1, value)] for key, value in asdict(load).items()}
            state.record_request_metrics_for_replica(ReplicaMetricReport(replica, metrics, time.time()))

    told(busy)
    assert state.get_decision_num_replicas(1) == grown
    told(*[Load(1, used=0.1, busy=0.1)] * grown)
    assert state.get_decision_num_replicas(grown) == 1
