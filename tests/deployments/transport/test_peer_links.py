"""Keeping links up: who is dialled, when again, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from deployments.transport.endpoints import PeerLinks
from deployments.transport.wire import LinkError, LinkRefusedError, LinkTimes, OtherModelError
from tests.waiting import eventually

TIMES = LinkTimes(first_backoff_s=0.001, max_backoff_s=0.004, unlisted_s=0.02)


class Peers:
    """Peers that can be dialled, their links, and the events of these.

    Attributes:
        futures: Of the links that are up; their result or exception ends them.
        refusals: Why a peer cannot be linked to.
    """

    def __init__(self, *, moves_on: bool = False) -> None:
        self.futures: dict[str, asyncio.Future[None]] = {}
        self.refusals: dict[str, str] = {}
        self.num_dials = 0
        self.events: list[tuple[str, str]] = []
        self.links = PeerLinks(
            self.dial,
            lambda p: self.events.append(("linked", p)),
            lambda p: self.events.append(("lost", p)),
            TIMES,
            lambda p: self.events.append(("other model", p)),
            moves_on=moves_on,
        )

    async def dial(self, peer: str, on_up: Callable[[], None]) -> None:
        self.num_dials += 1
        if self.refusals.get(peer) == "model":
            raise OtherModelError("it is of another model")
        if peer in self.refusals:
            raise LinkRefusedError(self.refusals[peer])
        on_up()
        self.futures[peer] = asyncio.get_running_loop().create_future()
        await self.futures[peer]

    def end(self, peer: str) -> None:
        self.futures.pop(peer).set_exception(LinkError("cut"))


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    peers = Peers()
    yield peers
    peers.links.close()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)


async def test_a_lost_link_is_told_at_once_and_opened_again(peers: Peers) -> None:
    peers.links.update(frozenset("b"))
    await eventually(lambda: peers.links.linked == {"b"})
    peers.end("b")
    await eventually(lambda: len(peers.events) >= 3)
    assert peers.events == [("linked", "b"), ("lost", "b"), ("linked", "b")]


async def test_a_peer_that_cannot_be_reached_is_tried_while_it_is_listed(peers: Peers) -> None:
    peers.refusals["b"] = "no"
    peers.links.update(frozenset("b"))
    await eventually(lambda: peers.num_dials >= 3)
    assert peers.events == []
    del peers.refusals["b"]
    await eventually(lambda: peers.events == [("linked", "b")])
    peers.refusals["c"] = "no"
    peers.links.update(frozenset("bc"))
    await eventually(lambda: peers.num_dials >= 6)
    peers.links.update(frozenset("b"))
    num_dials = peers.num_dials
    await asyncio.sleep(0.05)
    assert peers.num_dials == num_dials


async def test_a_peer_of_another_model_is_told_of_once_and_lost_when_it_is_gone(peers: Peers) -> None:
    peers.refusals["b"] = "model"
    peers.links.update(frozenset("b"))
    await eventually(lambda: peers.num_dials >= 3)
    assert peers.events == [("other model", "b")]
    peers.links.update(frozenset())
    assert peers.events == [("other model", "b"), ("lost", "b")]


@pytest.mark.parametrize("listed", ["", "x"])
async def test_a_link_that_is_up_survives_a_list_without_its_peer(peers: Peers, listed: str) -> None:
    """Serve may send an empty or a partial list while it recovers, and whoever drains is listed no more."""
    peers.refusals["x"] = "not there"
    peers.links.update(frozenset("ab"))
    await eventually(lambda: peers.links.linked == {"a", "b"})
    peers.links.update(frozenset(listed))
    await asyncio.sleep(0.05)
    assert peers.links.linked == {"a", "b"}
    peers.links.update(frozenset("ab"))
    peers.end("a")
    await eventually(lambda: peers.events[-2:] == [("lost", "a"), ("linked", "a")])


async def test_a_peer_that_is_listed_no_more_is_not_dialled_again(peers: Peers) -> None:
    peers.links.update(frozenset("b"))
    await eventually(lambda: peers.links.linked == {"b"})
    peers.links.update(frozenset())
    peers.end("b")
    await asyncio.sleep(0.05)
    assert (peers.events, peers.num_dials) == ([("linked", "b"), ("lost", "b")], 1)
    peers.links.update(frozenset("b"))
    await eventually(lambda: peers.events[-1] == ("linked", "b") and peers.num_dials == 2)


@pytest.fixture
async def moving() -> AsyncIterator[Peers]:
    """As an ingress: its peers are routers."""
    peers = Peers(moves_on=True)
    yield peers
    peers.links.close()


async def test_who_moves_on_leaves_a_peer_that_is_listed_no_more_for_one_that_it_works_with(moving: Peers) -> None:
    moving.refusals["b"] = "model"
    moving.links.update(frozenset("a"))
    await eventually(lambda: moving.links.linked == {"a"})
    moving.links.update(frozenset("b"))
    await eventually(lambda: moving.num_dials >= 10)
    await asyncio.sleep(2 * TIMES.unlisted_s)
    assert moving.links.linked == {"a"}
    moving.links.update(frozenset("bc"))
    await eventually(lambda: moving.links.linked == {"c"})
    assert moving.events == [("linked", "a"), ("other model", "b"), ("linked", "c"), ("lost", "a")]


async def test_a_peer_that_is_missing_for_a_moment_is_not_left(moving: Peers) -> None:
    moving.links.update(frozenset("ab"))
    await eventually(lambda: moving.links.linked == {"a", "b"})
    for listed in ("a", "b", "ab"):
        moving.links.update(frozenset(listed))
    await asyncio.sleep(3 * TIMES.unlisted_s)
    assert moving.events == [("linked", "a"), ("linked", "b")]


async def test_several_lists_without_a_peer_end_its_link_once(moving: Peers) -> None:
    moving.links.update(frozenset("ab"))
    await eventually(lambda: moving.links.linked == {"a", "b"})
    for listed in ("b", "bc", "b"):
        moving.links.update(frozenset(listed))
        moving.links._move_on()
    await eventually(lambda: moving.links.linked >= {"b"} and "a" not in moving.links.linked)
    await asyncio.sleep(3 * TIMES.unlisted_s)
    assert moving.events.count(("lost", "a")) == 1
    assert ("lost", "b") not in moving.events


async def test_closing_cuts_all_links_for_good(peers: Peers) -> None:
    peers.links.update(frozenset("ab"))
    await eventually(lambda: peers.links.linked == {"a", "b"})
    peers.links.close()
    await eventually(lambda: peers.links.linked == frozenset())
    await asyncio.sleep(0.05)
    assert peers.num_dials == 2


async def test_a_reason_is_logged_once_and_not_at_each_attempt(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    peers.refusals["b"] = "another model"
    peers.links.update(frozenset("b"))
    await eventually(lambda: peers.num_dials >= 5)
    assert caplog.text.count("another model") == 1
    peers.refusals["b"] = "draining"
    await eventually(lambda: "draining" in caplog.text)


async def test_attempts_are_further_and_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are counted, not waited for."""
    sleep, pauses_s = asyncio.sleep, []

    async def pause(seconds: float) -> None:
        pauses_s.append(seconds)
        await sleep(0)

    async def dial(peer: str, on_up: Callable[[], None]) -> None:
        raise LinkError("no")

    links = PeerLinks(dial, lambda _peer: None, lambda _peer: None, LinkTimes(first_backoff_s=1.0, max_backoff_s=6.0))
    monkeypatch.setattr(asyncio, "sleep", pause)
    links.update(frozenset("b"))
    while len(pauses_s) < 5:
        await sleep(0)
    links.close()
    assert pauses_s[:5] == [2.0, 4.0, 6.0, 6.0, 6.0]
