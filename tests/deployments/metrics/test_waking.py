"""A deployment without replicas is called while one is wanted, and at no other time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.metrics import autoscaling
from deployments.metrics.autoscaling import Waker
from tests.waiting import eventually


class Response:
    """Stands for Serve's response of a call that nobody answers yet."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False

    def __await__(self) -> Any:
        return self.answer.__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_one_call_waits_for_a_replica_while_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaling, "PERIOD_S", 0.002)
    is_wanted, num_looks, calls = False, 0, list[Response]()

    def look() -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_wanted

    def call() -> Response:
        calls.append(Response())
        if len(calls) == 2:
            raise RuntimeError("the deployment is not there")
        return calls[-1]

    waker = Waker(look, call)
    await eventually(lambda: num_looks > 3)
    assert calls == [], "nobody is wanted"
    is_wanted = True
    await eventually(lambda: calls)
    await asyncio.sleep(0.02)
    assert len(calls) == 1, "it waits"
    calls[0].answer.set_result(None)
    await eventually(lambda: len(calls) == 3)
    assert calls[0].is_cancelled, "which does nothing where it was answered"
    waker.close()
    await eventually(lambda: calls[2].is_cancelled)


async def test_what_is_wanted_for_a_moment_alone_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaling, "PERIOD_S", 0.001)
    looks, calls = 0, list[Response]()

    def look() -> bool:
        nonlocal looks
        looks += 1
        return looks % 2 == 0

    def call() -> Response:
        calls.append(Response())
        return calls[-1]

    waker = Waker(look, call)
    await eventually(lambda: looks > 10)
    waker.close()
    assert calls == []


async def test_a_call_that_nobody_answers_is_given_up_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaling, "PERIOD_S", 0.002)
    monkeypatch.setattr(autoscaling, "PATIENCE_S", 0.01)
    calls = list[Response]()

    def call() -> Response:
        calls.append(Response())
        return calls[-1]

    waker = Waker(lambda: True, call)
    await eventually(lambda: len(calls) > 2)
    assert calls[0].is_cancelled
    waker.close()
