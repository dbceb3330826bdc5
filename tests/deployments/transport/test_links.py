"""Keeping links up, over links in memory."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from deployments.transport.host import LoopHost
from deployments.transport.links import LinkKeeper, until_first_ends
from deployments.transport.memory import memory_dial
from deployments.transport.wire import LinkError, LinkTimes

TIMES = LinkTimes(first_backoff_s=0.001, max_backoff_s=0.004)


class Node:
    """A machine that sends what it is told to, and answers a number with its successor up to 10."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.got: list[tuple[str, int]] = []
        self._outbox: dict[str, list[Any]] = defaultdict(list)

    def send(self, peer: str, number: int) -> None:
        self._outbox[peer].append((self.name, number))

    def receive(self, message: tuple[str, int], now_s: float) -> None:
        self.got.append(message)
        sender, number = message
        if number < 10:
            self.send(sender, number + 1)

    def step(self, now_s: float) -> bool:
        return False

    def take_outbox(self) -> dict[str, list[Any]]:
        outbox, self._outbox = self._outbox, defaultdict(list)
        return outbox


class Pair:
    """Hosts of ``a`` and ``b``, and a keeper that links a to whoever is listed."""

    def __init__(self) -> None:
        self.hosts = {name: LoopHost(Node(name), tick_s=60.0) for name in "ab"}
        self.peers = {"b": self.hosts["b"]}
        self.events: list[tuple[str, str]] = []
        dial = memory_dial("a", self.hosts["a"], self.peers)
        self.keeper = LinkKeeper(
            dial, lambda p: self.events.append(("linked", p)), lambda p: self.events.append(("lost", p)), TIMES
        )

    def node(self, name: str) -> Node:
        return self.hosts[name]._machine


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    for host in pair.hosts.values():
        host.start()
    yield pair
    pair.keeper.close()
    for host in pair.hosts.values():
        host.stop()
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_messages_travel_both_ways(pair: Pair) -> None:
    pair.keeper.update(frozenset("b"))
    await until(lambda: pair.keeper.linked == {"b"})
    pair.hosts["a"].tell(lambda node, _now_s: node.send("b", 1))
    await until(lambda: len(pair.node("a").got) == 5)
    assert pair.node("b").got == [("a", 1), ("a", 3), ("a", 5), ("a", 7), ("a", 9)]
    assert pair.node("a").got == [("b", 2), ("b", 4), ("b", 6), ("b", 8), ("b", 10)]


async def test_a_lost_link_is_told_at_once_and_opened_again(pair: Pair) -> None:
    pair.keeper.update(frozenset("b"))
    await until(lambda: pair.keeper.linked == {"b"})
    pair.hosts["b"].unlink_all()
    await until(lambda: len(pair.events) >= 3)
    assert pair.events[:3] == [("linked", "b"), ("lost", "b"), ("linked", "b")]


async def test_a_peer_that_cannot_be_reached_is_tried_while_it_is_listed(pair: Pair) -> None:
    host = pair.peers.pop("b")
    pair.keeper.update(frozenset("b"))
    await asyncio.sleep(0.02)
    assert pair.events == []
    pair.peers["b"] = host
    await until(lambda: pair.events == [("linked", "b")])


async def test_a_peer_that_is_not_listed_any_more_is_lost_and_left_alone(pair: Pair) -> None:
    pair.keeper.update(frozenset("b"))
    await until(lambda: pair.keeper.linked == {"b"})
    pair.keeper.update(frozenset())
    await until(lambda: pair.keeper.linked == frozenset())
    await asyncio.sleep(0.02)
    assert pair.events == [("linked", "b"), ("lost", "b")]


async def test_attempts_are_further_and_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are counted, not waited for."""
    sleep, pauses_s = asyncio.sleep, []

    async def pause(seconds: float) -> None:
        pauses_s.append(seconds)
        await sleep(0)

    async def dial(peer: str, on_up: Callable[[], None]) -> None:
        raise LinkError("no")

    keeper = LinkKeeper(dial, lambda _peer: None, lambda _peer: None, LinkTimes(first_backoff_s=1.0, max_backoff_s=6.0))
    monkeypatch.setattr(asyncio, "sleep", pause)
    keeper.update(frozenset("b"))
    while len(pauses_s) < 5:
        await sleep(0)
    keeper.close()
    assert pauses_s[:5] == [2.0, 4.0, 6.0, 6.0, 6.0]


async def test_the_first_end_ends_all_and_is_what_is_raised() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LinkError("broken")

    with pytest.raises(LinkError, match="broken"):
        await until_first_ends(wait(), fail())
    await asyncio.wait_for(cancelled.wait(), 10)
    with pytest.raises(LinkError, match="ended"):
        await until_first_ends(asyncio.sleep(0), wait())
