"""Whom a router takes, and what is told of them; links over a real Serve: ``test_over_serve``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from deployments.transport.endpoints import PeerGroup, RouterEndpoint
from deployments.transport.host import LoopHost, WorkerHost
from deployments.transport.wire import WIRE_VERSION, Hello, LinkTimes
from specdec.core.types import Fingerprints
from tests.deployments.transport.nodes import Inbox

UNLISTED_S = 0.01


class Noted(Inbox):
    """Notes who came and went."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []

    def joined(self, peer: str, now_s: float) -> None:
        self.events.append(("joined", peer))

    def lost(self, peer: str, now_s: float) -> None:
        self.events.append(("lost", peer))


def hello(
    deployment: str,
    fingerprints: Fingerprints = Fingerprints(),  # noqa: B008
    wire: int = WIRE_VERSION,
    *,
    application: str = "mine",
    caller: str = "w",
    callee: str = "r",
) -> Hello:
    return Hello(caller, callee, deployment, fingerprints, wire, application)


@pytest.fixture
async def router() -> AsyncIterator[RouterEndpoint]:
    router = RouterEndpoint()
    router._host, router._me, router._closers, router._is_draining = LoopHost(Noted()), "r", [], False
    router._step_timeout_s, router._times = 30.0, LinkTimes(unlisted_s=UNLISTED_S)
    router._clients = set()
    router._fingerprints = Fingerprints("d", "v")
    router._application = "mine"
    router._groups = {
        (application, name): PeerGroup(name, Noted.joined, Noted.lost, match)
        for application, name, match in (
            ("mine", "Target", "decision"),
            ("mine", "Draft", "vocabulary"),
            ("pool", "Draft", "vocabulary"),
        )
    }
    yield router
    router.close_transport()


async def test_a_call_for_another_is_refused(router: RouterEndpoint) -> None:
    assert router._refusal(hello("Target", callee="x")) == "the call is for x"


@pytest.mark.parametrize(
    ("deployment", "fingerprints", "is_taken"),
    [
        ("Target", Fingerprints("d", "w"), True),
        ("Target", Fingerprints("e", "v"), False),
        ("Draft", Fingerprints("e", "v"), True),
        ("Draft", Fingerprints("d", "w"), False),
        ("Ingress", Fingerprints("d", "w"), True),
        ("Ingress", Fingerprints("e", "v"), False),
        ("Target", Fingerprints(), True),
    ],
)
async def test_targets_and_ingress_agree_on_decisions_drafters_on_the_vocabulary(
    router: RouterEndpoint, deployment: str, fingerprints: Fingerprints, is_taken: bool
) -> None:
    assert (router._refusal(hello(deployment, fingerprints)) == "") == is_taken
    assert "wire version" in router._refusal(hello(deployment, fingerprints, WIRE_VERSION + 1))
    assert "wire version is 0" in router._refusal(Hello("w", "r", deployment, fingerprints))


@pytest.mark.parametrize(
    ("application", "deployment", "is_taken"),
    [("pool", "Draft", True), ("another", "Draft", False), ("pool", "Target", False), ("another", "Ingress", False)],
)
async def test_of_other_applications_only_drafters_of_named_pools_are_taken(
    router: RouterEndpoint, application: str, deployment: str, is_taken: bool
) -> None:
    """What is of the same models may be refused all the same: its replicas are another application's."""
    why = router._refusal(hello(deployment, Fingerprints("d", "v"), application=application))
    assert why == ("" if is_taken else f"{application} is an application of which this one wants no {deployment}")


async def test_who_drains_or_has_failed_takes_nobody(router: RouterEndpoint) -> None:
    call = hello("Target")
    assert router._refusal(call) == ""
    router._host._fail(ValueError("poisoned"))
    assert router._refusal(call) == "the replica has failed"
    await router.drain()
    assert router._refusal(call) == "the replica is draining"
    router.close_transport()
    router.close_transport()
    assert router._refusal(call) == "the replica is draining"
    await router.check_health()


async def test_the_machine_is_told_of_workers_alone(router: RouterEndpoint) -> None:
    router._host.start()
    for deployment in ("Target", "Draft", "Ingress"):
        call = hello(deployment, caller=deployment.lower())
        router._joined(call)
        router._lost(call)
    await asyncio.sleep(0)
    machine = router._host._machine
    assert machine.events == [("joined", "target"), ("lost", "target"), ("joined", "draft"), ("lost", "draft")]
    await router.__del__()
    assert router.__del__() is None


async def test_a_router_that_is_listed_no_more_ends_its_links_when_the_last_ingress_has_gone(
    router: RouterEndpoint,
) -> None:
    ended = list[None]()
    router._streams = SimpleNamespace(close=lambda: ended.append(None))
    first, second = (hello("Ingress", caller=caller) for caller in ("first", "second"))
    router._listed(frozenset("x"))  # it starts
    router._joined(first)
    router._listed(frozenset("xr"))
    router._joined(second)
    router._lost(first)
    router._lost(second)
    router._listed(frozenset("x"))  # for a moment
    router._listed(frozenset("xr"))
    await asyncio.sleep(3 * UNLISTED_S)
    assert not ended, "it stays"
    router._joined(first)
    router._joined(second)
    router._listed(frozenset("x"))
    router._lost(first)
    await asyncio.sleep(3 * UNLISTED_S)
    assert not ended
    assert router._refusal(hello("Target")) == ""
    router._lost(second)
    assert ended
    assert router._refusal(hello("Target")) == "the replica is draining"


async def test_a_router_without_an_ingress_ends_its_links_when_it_is_listed_no_more(router: RouterEndpoint) -> None:
    ended = asyncio.Event()
    router._streams = SimpleNamespace(close=ended.set)
    router._listed(frozenset("r"))
    router._listed(frozenset())
    await asyncio.wait_for(ended.wait(), 60)


async def test_a_machine_that_hangs_is_not_waited_for(router: RouterEndpoint) -> None:
    release, steps = threading.Event(), []
    machine = Noted()
    machine.step = lambda _now_s: steps.append(release.wait(10)) or False
    machine.drain, machine.is_drained = steps.append, False
    router._host, router._step_timeout_s = WorkerHost(machine), 0.01
    router._host.start()
    await asyncio.sleep(0.1)
    async with asyncio.timeout(5):
        await router.__del__()
    assert not steps, "it was in its first step all the time"
    release.set()
