"""What an endpoint makes of the lists of live replicas; its streams are tested over a real Serve."""

from __future__ import annotations

import pytest

from deployments.transport.endpoints import WorkerEndpoint, _worker_host
from deployments.transport.host import LoopHost, WorkerHost
from deployments.transport.sharing import SharingHost, SteadyHost
from deployments.transport.wire import Hello
from specdec.engine.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.protocol.draft_worker import DraftWorkerMachine
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from specdec.protocol.target import TargetMachine


class Silent:
    """A machine that does nothing."""

    def receive(self, message: object, now_s: float) -> None:
        pass

    def step(self, now_s: float) -> bool:
        return False

    def take_outbox(self) -> dict[str, list[object]]:
        return {}


@pytest.fixture
async def worker() -> WorkerEndpoint:
    worker = WorkerEndpoint()
    worker._host, worker._me = LoopHost(Silent()), "w"
    worker._watches, worker._groups, worker._current, worker._reachable = [], [], {}, False
    return worker


async def test_a_replica_that_is_listed_no_more_ends_its_links_and_opens_none(worker: WorkerEndpoint) -> None:
    mailbox = worker._host.attach("r")
    worker._on_own_list(frozenset())
    assert not mailbox.closed, "it was not listed yet: it is starting, not stopping"
    worker._on_own_list(frozenset({"w"}))
    assert worker._refusal(Hello("r", "w", "link")) is None
    worker._on_own_list(frozenset({"x"}))
    assert mailbox.closed
    worker._on_own_list(frozenset({"y"}))
    assert worker._refusal(Hello("r", "w", "link")) == "the replica is shutting down"


async def test_a_replica_that_is_listed_again_goes_on(worker: WorkerEndpoint) -> None:
    for listed in ("w", "", "", "w"):
        worker._on_own_list(frozenset(listed))
    assert worker._refusal(Hello("r", "w", "link")) is None


async def test_calls_for_another_and_after_the_end_are_refused(worker: WorkerEndpoint) -> None:
    assert worker._refusal(Hello("r", "x", "link")) == "the call is for x"
    worker.close_transport()
    worker.close_transport()
    assert worker._refusal(Hello("r", "w", "link")) == "the replica is shutting down"
    await worker.check_health()


def test_targets_and_drafters_see_to_messages_beside_their_steps() -> None:
    """Each of them to what its machine says may come then."""
    times = Times()
    script = Script(0.8, 0.9, tuple(range(50)))
    target, solo = (TargetMachine(name, ScriptedTarget(script, 100), times) for name in ("t", "d"))
    drafter = DraftWorkerMachine(DrafterMachine("d", ScriptedDrafter(script, 100), times), solo)
    for machine, kind, meanwhile in ((target, SteadyHost, target), (drafter, SharingHost, drafter.drafter)):
        host = _worker_host(machine, None, 0.005)
        assert type(host) is kind
        assert meanwhile.meanwhile == host.meanwhile
    assert type(_worker_host(Silent(), None, 0.005)) is WorkerHost
