"""Who waits for whom while one version takes the place of another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from deployments.transport import succession
from deployments.transport.succession import Succession
from deployments.transport.wire import WIRE_VERSION, Identity
from specdec.core.types import Fingerprints

OLD, NEW = Fingerprints("old", "v"), Fingerprints("new", "v")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "POLL_S", 0.0)


def replica(
    deployment: str, of: Fingerprints, name: str = "other", *, serves: bool = True, wire: int = WIRE_VERSION
) -> Identity:
    return Identity(deployment, name, 1, "node", of, serves, wire)


class Cluster:
    """Running replicas, one set after another: the last stays."""

    def __init__(self, *states: Sequence[Identity] | None) -> None:
        self.states = list(states)
        self.num_asked = 0

    async def ask(self, deployment: str) -> list[Identity] | None:
        self.num_asked += 1
        found = self.states[0]
        if deployment == "Router" and len(self.states) > 1:  # the first question of a round
            self.states.pop(0)
        return None if found is None else [one for one in found if one.deployment == deployment]


def router(cluster: Cluster, of: Fingerprints = NEW) -> Succession:
    return Succession(replica("Router", of, "me"), ask=cluster.ask)


async def waits(succession: Succession, *, is_linked: bool = True) -> bool:
    """Whether a replica that starts holds back."""
    try:
        async with asyncio.timeout(0.05):
            await succession.await_turn("Target", lambda: is_linked)
    except TimeoutError:
        return True
    return False


OLD_ROUTER, OLD_TARGET = replica("Router", OLD), replica("Target", OLD)


@pytest.mark.parametrize(
    ("running", "holds_back"),
    [
        ([], False),  # the first start
        ([replica("Router", NEW)], False),  # an update that changes no token: links go across versions
        ([OLD_ROUTER], True),
        ([OLD_ROUTER, OLD_TARGET], True),
        ([OLD_ROUTER, replica("Target", NEW, serves=False)], True),
        ([OLD_ROUTER, replica("Target", NEW)], False),
        ([OLD_ROUTER, replica("Target", NEW, wire=WIRE_VERSION + 1)], True),
        ([replica("Router", NEW, wire=WIRE_VERSION - 1), replica("Target", NEW, wire=WIRE_VERSION - 1)], True),
        (None, True),  # nobody knows yet who runs
    ],
)
async def test_a_version_that_could_not_serve_takes_nobodys_place(
    running: list[Identity] | None, holds_back: bool
) -> None:
    assert await waits(router(Cluster(running))) is holds_back


async def test_an_ingress_needs_a_link_too() -> None:
    cluster = Cluster([OLD_ROUTER, replica("Target", NEW)])
    assert await waits(router(cluster), is_linked=False)
    assert not await waits(router(cluster), is_linked=True)


async def test_it_starts_as_soon_as_its_target_serves() -> None:
    cluster = Cluster([OLD_ROUTER], [OLD_ROUTER], [OLD_ROUTER, replica("Target", NEW)])
    async with asyncio.timeout(5):
        await router(cluster).await_turn("Target")
    assert len(cluster.states) == 1


async def goes_on(cluster: Cluster, num_clients: int) -> int:
    """For how many looks a replica that is to stop still takes what is new, with clients that leave one by one."""
    clients = list(range(num_clients))
    looks = 0

    def has_clients() -> bool:
        nonlocal looks
        if not clients:
            return False
        clients.pop()
        looks += 1
        return True

    async with asyncio.timeout(5):
        await router(cluster, OLD).hand_over(has_clients)
    return looks


@pytest.mark.parametrize(
    ("running", "looks"),
    [
        ([], 1),  # it is replaced in place: its successor waits for its device
        ([replica("Router", OLD, "me")], 1),  # the list is not up to date
        ([replica("Router", OLD), replica("Router", NEW)], 1),  # another of its version takes what is new
        ([replica("Router", NEW)], 3),  # nobody else serves its clients
        (None, 3),  # a sibling that does not answer may be the only successor, or none
    ],
)
async def test_the_last_of_a_version_goes_on_until_nobody_asks_it(running: list[Identity] | None, looks: int) -> None:
    assert await goes_on(Cluster(running), 3) == looks
    assert await goes_on(Cluster(running), 0) == 0
