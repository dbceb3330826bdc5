from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.launch import local
from cluster.launch.local import drain_ingress


class Replica:
    """An ingress that has so many requests open, one less each time that it is told to local."""

    def __init__(self, num_open: int, fails: bool = False) -> None:
        self.num_open = num_open
        self.fails = fails
        self.calls: list[str] = []

    async def answer(self, method: str) -> int:
        self.calls.append(method)
        if self.fails:
            raise ConnectionError
        self.num_open = max(0, self.num_open - 1)
        return self.num_open


class Handle:
    """Serve's handle of the ingress, as far as a drain needs it."""

    def __init__(self, *replicas: Replica, on_ask: Callable[[Handle], None] = lambda _: None) -> None:
        self.replicas = list(replicas)
        self._on_ask = on_ask

    def broadcast(self, method: str) -> Handle:
        self._method = method
        self._on_ask(self)
        return self

    async def results_async(self, return_exceptions: bool) -> list:
        if not self.replicas:
            raise LookupError("no replica")
        answers = [replica.answer(self._method) for replica in self.replicas]
        return await asyncio.gather(*answers, return_exceptions=return_exceptions)


def test_it_waits_for_the_last_request_of_every_replica(monkeypatch):
    monkeypatch.setattr(local, "POLL_S", 0.0)
    short, long = Replica(2), Replica(5)
    running: list[int | None] = []
    assert drain_ingress(Handle(short, long), 60, report=running.append)
    assert long.calls == ["drain_requests"] * 5
    assert short.calls == long.calls, "a replica that started again is told again"
    assert running == [5, 3, 2, 1]


def test_a_replica_that_is_gone_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(local, "POLL_S", 0.0)
    assert drain_ingress(Handle(Replica(2), Replica(9, fails=True)), 60)
    assert drain_ingress(Handle(), 60)


def test_a_replica_that_hangs_is_waited_for_until_the_time_is_over(monkeypatch):
    monkeypatch.setattr(local, "PATIENCE_S", 0.01)

    class Hanging(Replica):
        async def answer(self, method):
            await asyncio.sleep(3600)

    running: list[int | None] = []
    assert not drain_ingress(Handle(Replica(1), Hanging(0)), 0.1, report=running.append)
    assert running == [None]


def test_requests_that_do_not_end_are_given_up_after_the_time_limit():
    replica = Replica(10**9)
    assert not drain_ingress(Handle(replica), 0.0)
    assert replica.calls == ["drain_requests"], "it is told even where no time is given"


def test_nobody_is_asked_where_ray_has_died():
    replica = Replica(1)
    assert not drain_ingress(Handle(replica), 60, lambda: False)
    assert replica.calls == []


def test_what_has_not_changed_is_not_told_again(monkeypatch):
    monkeypatch.setattr(local, "POLL_S", 0.0)
    counts = iter([3, 3, 1, 1, 0])

    class Slow(Replica):
        async def answer(self, method):
            return next(counts)

    calls: list[int | None] = []
    assert drain_ingress(Handle(Slow(0)), 60, report=calls.append)
    assert calls == [3, 1]
