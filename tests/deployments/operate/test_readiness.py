"""Readiness, from what replicas answer, or fail to answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.launch.replicas import PATIENCE_S
from deployments.operate.readiness import ReplicaPoll, Workers, missing_parts

ROUTER: Workers = {"T#1": ("target", False)}


class Handle:
    """Stands for a deployment's handle: gives what its replicas answer, exceptions among it, or nothing from one."""

    def __init__(self, *answers: Any) -> None:
        self.answers: list[Any] = list(answers)
        self.num_asked = 0

    def broadcast(self, method: str) -> Handle:
        self.num_asked += 1
        return self

    async def _fetch_replica_results_async(self) -> list[Replica]:
        return [Replica(answer) for answer in self.answers]


class Replica:
    """One replica's answer that is to come."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is HANGS:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


HANGS = object()


def asked(handle: Handle, fresh_s: float = 0.0) -> ReplicaPoll:
    return ReplicaPoll(lambda: handle, "refusal", fresh_s)


@pytest.mark.parametrize(
    ("refusals", "routers", "missing"),
    [
        ([""], [ROUTER], set()),
        (["draining", ""], [{}, ROUTER], set()),
        ([], [ROUTER], {"ingress"}),
        (["draining"], [ROUTER], {"ingress"}),
        ([""], [], {"router", "target"}),
        ([""], [{"D#1": ("drafter", False)}], {"target"}),
        ([""], [{"T#1": ("target", True)}], {"target"}),
        ([""], [{"T#1": ("target", True), "T#2": ("target", False)}], set()),
    ],
)
def test_ready_is_an_ingress_that_takes_requests_a_router_and_a_target(
    refusals: list[str], routers: list[Workers], missing: set[str]
) -> None:
    assert set(missing_parts(refusals, routers)) == missing


async def test_a_replica_that_fails_costs_no_other_ones_answer() -> None:
    ingresses = asked(Handle("", RuntimeError("gone"), "draining"))
    assert await ingresses.get() == ["", "draining"]
    assert ingresses.num_failures == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launch.replicas.PATIENCE_S", PATIENCE_S / 100)


async def test_a_replica_that_hangs_costs_no_other_ones_answer(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at first, and not when what was answered before would be too old."""
    monkeypatch.setattr("deployments.operate.readiness.STALE_S", 0.0)
    handle = Handle("", HANGS, "draining", HANGS)
    ingresses = asked(handle)
    for num_failures in (2, 4):
        assert await ingresses.get() == ["", "draining"]
        assert ingresses.num_failures == num_failures


async def test_answers_of_before_hold_while_all_hang(impatient: None) -> None:
    handle = Handle("")
    ingresses = asked(handle)
    await ingresses.get()
    handle.answers = [HANGS]
    assert await ingresses.get() == [""]
    assert ingresses.num_failures == 1


async def test_answers_that_are_old_are_dropped(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.operate.readiness.STALE_S", 0.0)
    handle = Handle("")
    ingresses = asked(handle)
    assert await ingresses.get() == [""]
    handle.answers = [HANGS]
    assert set(missing_parts(await ingresses.get(), [ROUTER])) == {"ingress"}


async def test_nobody_waits_long_for_a_replica_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is told, then what is known; only where nothing is known all are waited for."""
    monkeypatch.setattr("deployments.operate.readiness.QUICK_S", 0.01)
    monkeypatch.setattr("cluster.launch.replicas.PATIENCE_S", 60.0)
    handle = Handle("", HANGS, "draining")
    ingresses = asked(handle)
    async with asyncio.timeout(10):
        assert await ingresses.get() == ["", "draining"]
        assert (await ingresses.get(), handle.num_asked) == (["", "draining"], 1), "one round at a time"
    healthy = Handle("")
    known = asked(healthy)
    assert await known.get() == [""]
    healthy.answers = [HANGS]
    async with asyncio.timeout(10):
        assert await known.get() == [""]
    first = asyncio.ensure_future(asked(Handle(HANGS)).get())
    await asyncio.sleep(0.1)
    assert not first.done()
    first.cancel()


async def test_without_an_application_nothing_answers() -> None:
    def handle() -> Any:
        raise RuntimeError("there is no application")

    assert await ReplicaPoll(handle, "refusal", 0.0).get() == []


async def test_however_many_ask_replicas_are_asked_once() -> None:
    handle = Handle("")
    ingresses = asked(handle, 60.0)
    assert await asyncio.gather(*(ingresses.get() for _ in range(20))) == [[""]] * 20
    assert handle.num_asked == 1


async def test_that_nobody_answers_is_said_once_until_somebody_does(caplog: pytest.LogCaptureFixture) -> None:
    handles = iter([None, None, Handle(""), None])

    def find() -> Handle:
        handle = next(handles)
        if handle is None:
            raise RuntimeError("no replica")
        return handle

    replicas = ReplicaPoll(find, "refusal", 0.0)
    with caplog.at_level("INFO", logger="ray.serve"):
        for _ in range(4):
            await replicas.get()
    assert [record.getMessage() for record in caplog.records if "Nobody" in record.getMessage()] == [
        "Nobody answers refusal: RuntimeError('no replica')"
    ] * 2
