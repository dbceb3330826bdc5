"""How many replicas there should be, and what Serve is told and given for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, HandleMetricReport, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo

from cluster.config import AppArgs
from cluster.replicas import ReplicaRange
from deployments.app import replica_options
from deployments.autoscaling import BUSY, FULL, Autoscaler, ExposedDrafts, Load, desired_replicas, load_of
from deployments.metrics.replica import ReplicaMetrics


@pytest.mark.parametrize(
    ("loads", "sequences", "desired"),
    [
        ([Load()], None, 1),
        ([Load(8, 0, FULL)], None, 1),
        ([Load(8, 0, FULL + 0.01)], None, 2),
        ([Load(20, 4, 1.0)], None, 2),
        ([Load(20, 10, 1.0)], None, 3),
        ([Load(3, 3, 0.0)], None, 4),
        ([Load(8, 0, 0.7), Load(8, 0, 0.7), Load(2, 0, 0.1)], None, 2),
        ([Load(8, 0, 0.1), Load()], None, 1),
        ([Load(8, 0, 0.1)], 4, 2),
        ([Load(9, 0, 0.1)], 4, 3),
        ([Load(4, 0, 0.1), Load()], 4, 1),
        ([Load(4, 0, 0.9)], 8, 2),
    ],
)
def test_targets_have_room_for_what_they_hold_and_for_what_waits(
    loads: list[Load], sequences: float | None, desired: int
) -> None:
    assert desired_replicas("target", loads, sequences) == desired


@pytest.mark.parametrize(
    ("loads", "desired"),
    [
        ([Load()], 0),
        ([Load(0.2)], 0),
        ([Load(), Load(0.1, used=0.9)], 0),
        ([Load(4, used=0.9, late=0.04)], 1),
        ([Load(4, used=0.9, late=0.06)], 2),
        ([Load(4, used=0.1, late=0.2)], 1),
        ([Load(4, used=0.9, late=0.2), Load(4, used=0.5, late=0.2)], 3),
        ([Load(4, used=0.5), Load(4, used=0.5)], 2),
        ([Load(4, used=BUSY / 2), Load(4, used=BUSY / 2)], 1),
        ([Load(4), Load(4), Load(4)], 2),
    ],
)
def test_drafters_follow_the_time_that_late_drafts_cost(loads: list[Load], desired: int) -> None:
    assert desired_replicas("draft", loads) == desired


@pytest.mark.parametrize("part", ["router", "ingress"])
@pytest.mark.parametrize(
    ("loads", "sequences", "desired"),
    [
        ([Load()], None, 1),
        ([Load(100, used=0.8, late=0.01)], None, 1),
        ([Load(100, used=0.8, late=0.2)], None, 2),
        ([Load(100, used=0.1, late=0.2)], None, 1),
        ([Load(100, used=0.3), Load(100, used=0.3)], None, 2),
        ([Load(), Load()], None, 1),
        ([Load(100)], 40, 3),
    ],
)
def test_loops_that_lag_are_relieved(part: str, loads: list[Load], sequences: float | None, desired: int) -> None:
    assert desired_replicas(part, loads, sequences) == desired


def test_a_load_is_read_from_reports() -> None:
    report = {"num_sequences": 5.0, "num_waiting_sequences": 2.0, "kv_cache_usage_perc": 0.25, "busy_s": 9.0}
    assert load_of("target", report, {}, 1.0) == Load(5, 2, 0.25)
    assert load_of("draft", report, {"busy_s": 8.0}, 2.0) == Load(5, used=0.5)
    assert load_of("draft", report, {}, 2.0) == Load(5), "what was before is not known"
    loop = {"loop_lag_s": 0.1, "loop_busy_share": 0.7}
    assert load_of("router", loop | {"num_sessions": 3.0}, {}, 1.0) == Load(3, used=0.7, late=0.1)
    assert load_of("ingress", loop | {"num_requests": 3.0}, {}, 1.0) == Load(3, used=0.7, late=0.1)


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
    return SimpleNamespace(aggregated_metrics=told, running_replicas=running, target_num_replicas=target)


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
    assert policy(context({"a": Load(9), "b": Load(8)}, ["a", "b"], 2)) == (5, {})
    assert policy(context({"a": Load(9)}, ["a", "b"], 2)) == (3, {}), "b has told nothing yet"
    assert policy(context({}, ["a"], 2)) == (2, {}), "nobody has told anything"
    assert policy_of(count, "draft")(context({}, [], 0)) == (0, {})


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
    assert metrics.load.used > 0
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
    ("part", "busy", "grown"), [("target", Load(16, 8, 1.0), 3), ("draft", Load(9, used=0.9, late=0.3), 2)]
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
    told(*[Load(1, used=0.1)] * grown)
    assert state.get_decision_num_replicas(grown) == 1
