"""What each deployment's machine knows of its models: the fingerprints by which it refuses other ones."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specdec.demo
from cluster.config.app import AppArgs
from cluster.config.environment import RAY_SETTINGS, check_node
from cluster.launch.startup import NO_DRAFTS
from cluster.models.identity import fingerprints
from deployments import ingress, router, workers
from deployments.metrics.autoscaling import Load
from deployments.metrics.replica import Measured
from specdec.core.errors import InvalidParameterError
from specdec.core.messages import Alive, Submit
from specdec.core.params import SamplingParams, SequenceSpec

SCRIPTED = "benchmarks.backends:stand_in:acceptance=0.5"
DEMO = Path(specdec.demo.__path__[0])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The newest machine that was to be started and what its links were told, without links."""
    found: dict[str, Any] = {}

    def start(self: object, machine: object, **keywords: object) -> None:
        found.clear()
        found.update(keywords, machine=machine)

    for name, value in RAY_SETTINGS.items():
        monkeypatch.setenv(name, value)
    for module in (workers, router):
        monkeypatch.setattr(module, "replica_id", lambda: "me")
        monkeypatch.setattr(module, "set_log_level", lambda args: None)
    monkeypatch.setattr(workers.WorkerEndpoint, "start_worker", start)
    monkeypatch.setattr(router.RouterEndpoint, "start_router", start)
    monkeypatch.setattr(Measured, "start_metrics", lambda self, metrics: None)
    monkeypatch.setattr(workers, "_startup", lambda: nullcontext(lambda line: None))
    return found


def test_all_machines_of_a_service_know_the_same_models(started: dict[str, Any]) -> None:
    args = AppArgs.model_validate({"backend": SCRIPTED, "num_speculative_tokens": 2, "step_timeout_s": 5})
    own = fingerprints(args)
    assert own.decision
    assert own.vocabulary
    workers.TargetServer(args, 1, 1.0)
    assert started["machine"].fingerprint == own.decision
    assert (started["fingerprints"], started["step_timeout_s"]) == (own, 5)
    limited = args.model_copy(update={"limits": args.limits.model_copy(update={"max_reopens": 7})})
    router.SpeculationRouter(limited)
    assert started["machine"].quarantine.max_reopens == 7
    router.SpeculationRouter(args)
    assert started["machine"].fingerprints == own
    assert started["machine"].quarantine.max_reopens == 3
    assert started["fingerprints"] == own


def test_a_target_says_how_far_its_step_is(started: dict[str, Any]) -> None:
    args = AppArgs.model_validate({"num_speculative_tokens": 2, "target": {"kv_cache_memory": "64MiB"}})
    workers.TargetServer(args, 1, 1.0)
    assert isinstance(started["last_progress"](), float)


@pytest.mark.parametrize(
    ("keys", "may_be_none"),
    [
        ({}, False),
        ({"replicas": {"draft": {"min": 1, "max": 2}}}, False),
        ({"replicas": {"draft": {"min": 0, "max": 2}}}, True),
        ({"draft": {"application": "drafts"}}, False),
    ],
)
def test_a_router_calls_for_a_drafter_where_there_may_be_none(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], may_be_none: bool
) -> None:
    asked: list[Any] = []

    class Waker:
        def __init__(self, is_wanted: Any, call: Any) -> None:
            asked.append(is_wanted)

        def close(self) -> None:
            pass

    monkeypatch.setattr(router, "Waker", Waker)
    monkeypatch.setattr(router.SpeculationRouter, "_closers", [], raising=False)
    router.SpeculationRouter(AppArgs.model_validate({"num_speculative_tokens": 2, **keys}))
    assert len(asked) == may_be_none
    if not may_be_none:
        return
    machine, (is_wanted,) = started["machine"], asked
    machine.worker_joined("T", "target", 0.0)
    assert not is_wanted()
    machine.receive(Submit("s", 1, "I", (1, 2), SequenceSpec(SamplingParams(), 1, 2, 9)), 0.0)
    assert is_wanted()
    machine.worker_joined("D", "drafter", 0.0)
    assert not is_wanted()
    machine.receive(Submit("t", 1, "I", (1, 2), SequenceSpec(SamplingParams(), 1, 2, 9)), 0.0)
    machine.receive(Alive("D", {"is_draining": 1.0}), 0.0)
    machine.receive(Submit("u", 1, "I", (1, 2), SequenceSpec(SamplingParams(), 1, 2, 9)), 0.0)
    assert is_wanted(), "it takes nothing new"


def test_a_router_knows_drafters_by_their_application(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "Waker", lambda *_: SimpleNamespace(close=None))
    monkeypatch.setattr(router.SpeculationRouter, "_closers", [], raising=False)
    router.SpeculationRouter(AppArgs.model_validate({"draft": {"application": "drafts"}}))
    groups = {(group.application, group.deployment): group for group in started["workers"]}
    assert groups.keys() == {(None, "TargetServer"), ("drafts", "DraftServer")}
    groups["drafts", "DraftServer"].joined(started["machine"], "D", 0.0)
    assert started["machine"].worker_metrics()["D"][0] == "drafter"


async def draft_server(problem: str = "", **keys: Any) -> workers.DraftServer:
    server = workers.DraftServer({"backend": SCRIPTED, "num_speculative_tokens": 2, **keys}, 1, 1.0, problem)
    server._host = None
    return server


async def loaded(server: workers.DraftServer, **config: Any) -> None:
    await server.reconfigure({"applications": ["chat"], **config})
    await server._has_tried.wait()


async def test_a_drafter_serves_the_applications_that_its_user_config_names(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, dialled = await draft_server(), []
    monkeypatch.setattr(server, "dial_routers_of", dialled.append)
    await loaded(server, protocol={"lease_s": 9})
    assert started["machine"].fingerprint == fingerprints(AppArgs()).vocabulary
    assert (started["applications"], started["match"]) == (("chat",), "vocabulary")
    monkeypatch.setattr(server, "_go_by", lambda args: None)
    await server.reconfigure({"applications": ["chat", "code"]})
    assert dialled == [("chat", "code")]
    await server.reconfigure({"applications": ["chat"], "nonsense": 1})
    assert server.config_metrics() == {"num_config_errors": 1.0}, "what was in force stays so"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"draft": {"model": "/nowhere"}}, "draft.model"),
        ({"draft": {"method": "ngram"}}, "name no draft model"),
        ({"problem": "num_gpus must be"}, "num_gpus must be"),
    ],
)
async def test_a_draft_that_cannot_be_loaded_fails_no_start_and_says_why(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], words: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(workers, "_startup", lambda: nullcontext(said.append))
    server = await draft_server(**keys)
    await loaded(server)
    assert words in server._failure
    assert said[-1] == f"{NO_DRAFTS}{server._failure}"
    assert (await server._metrics())["draft_failed"] == 1
    said.clear()
    await server.check_health()
    assert said == []
    server._told_s = float("-inf")
    await server.check_health()
    assert said == [f"{NO_DRAFTS}{server._failure}"], "what nobody repeats is forgotten"
    assert not started


async def test_the_metrics_of_a_drafter_name_the_model_that_it_drafts_for(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []
    monkeypatch.setattr(workers, "ReplicaMetrics", lambda part, model_name, ask: named.append(model_name))
    await loaded(await draft_server(), target={"model": str(DEMO / "target")})
    assert named == [str(DEMO / "target")]


async def test_a_draft_is_tried_again(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(workers, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(workers, "profile_drafter", lambda *_: None)
    monkeypatch.setattr(workers, "backend_of", fails)
    server = await draft_server()
    await loaded(server)
    assert "out of memory" in server._failure
    monkeypatch.setattr(workers, "backend_of", lambda *_: SimpleNamespace(metrics=dict))
    while server._machine is None:
        await asyncio.sleep(0.01)
    assert server._failure == ""
    assert (await server._has_tried.wait(), bool(started)) == (True, True)


async def test_another_vocabulary_makes_serve_replace_the_drafter(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await draft_server()
    await loaded(server)
    monkeypatch.setattr(server, "_go_by", lambda args: None)
    monkeypatch.setattr(server, "dial_routers_of", lambda _: None)
    await server.reconfigure({"applications": ["chat"]})
    await server.check_health()
    monkeypatch.setattr(workers, "_vocabulary", lambda _: "another")
    await server.reconfigure({"applications": ["chat"]})
    with pytest.raises(InvalidParameterError, match="another vocabulary"):
        await server.check_health()


async def test_drafters_tell_serve_how_late_drafts_are_for_the_application_that_waits_most(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await draft_server()
    await loaded(server, applications=["chat", "code"])
    shares = {"chat": [0.1], "code": [0.3, 0.2]}
    monkeypatch.setattr(workers.serve, "get_deployment_handle", lambda name, application: Shares(shares[application]))
    server._replica_metrics = SimpleNamespace(load=Load(4, busy=0.9))  # type: ignore[assignment]
    assert await server.record_autoscaling_stats() == asdict(Load(4, busy=0.9, late=0.3))


class Shares:
    """Stands for the handle of an application's routers."""

    def __init__(self, shares: list[float]) -> None:
        self._shares = shares

    def broadcast(self, method: str) -> Shares:
        assert hasattr(router.SpeculationRouter, method)
        return self

    async def _fetch_replica_results_async(self) -> list[Share]:
        return [Share(share) for share in self._shares]


class Share:
    """What one router says."""

    def __init__(self, share: float) -> None:
        self._share = share

    async def get_async(self) -> float:
        return self._share


async def test_a_router_tells_how_late_the_drafts_of_its_targets_are(started: dict[str, Any]) -> None:
    server = router.SpeculationRouter(AppArgs.model_validate({"num_speculative_tokens": 2}))
    machine = started["machine"]
    machine.worker_joined("T", "target", 0.0)
    told = {"num_late_rounds": 0.0, "num_committed_tokens": 0.0, "num_drafts": 0.0, "num_accepted_tokens": 0.0}
    for num_late, num_committed in ((0.0, 0.0), (20.0, 60.0)):
        report = told | {"num_late_rounds": num_late, "num_committed_tokens": num_committed}
        machine.receive(Alive("T", report), 0.0)
        server._exposed._at_s = float("-inf")  # a second later
        await server._metrics()
    assert await server.exposed_draft_share() == pytest.approx(0.25)


NAME = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"


@pytest.mark.parametrize(("value", "is_enough"), [(None, False), ("4194304", False), ("", False), (str(1 << 30), True)])
def test_a_node_without_the_settings_of_its_environment_is_refused(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: str | None, is_enough: bool
) -> None:
    check_node()
    if value is None:
        monkeypatch.delenv(NAME)
    else:
        monkeypatch.setenv(NAME, value)
    args = AppArgs.model_validate({"backend": SCRIPTED})
    starts = (lambda: workers.TargetServer(args, 1, 1.0), lambda: router.SpeculationRouter(args))
    for start in (
        *starts,
        lambda: workers.DraftServer(args, 1, 1.0),
        lambda: ingress.OpenAIIngress.__mro__[1](args, None),
    ):
        if is_enough:
            check_node()
            continue
        with pytest.raises(InvalidParameterError, match="must be 268435456: start Ray on every node") as caught:
            start()
        assert caught.value.parameter == NAME
