"""A host whose machine sees to its messages while its model works."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import pytest

from deployments.transport import host as host_module
from deployments.transport.priority import Precedence
from deployments.transport.sharing import SharingHost, SteadyHost
from deployments.transport.wire import HostFailedError
from tests.deployments.transport.test_priority import may_go_on_at_once

IDLE_S = 60.0
"""Longer than any test: whatever happens sooner was not a timer's doing."""


class Light(str):
    """May be received while the model works."""


class Heavy(str):
    """Starts a step of the model."""


class Model:
    """A machine whose model works until the test lets it go on, once for each heavy message."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext
        self.received: list[tuple[str, bool]] = []
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.is_working = False
        self._todo = 0
        self._said: list[str] = []

    def receive(self, message: str, now_s: float) -> None:
        if message == "poison":
            raise ValueError("poisoned")
        self.received.append((message, self.is_working))
        self._todo += isinstance(message, Heavy)
        self._said.append(f"got {message}")

    def step(self, now_s: float) -> bool:
        if not self._todo:
            return False
        self._todo -= 1
        with self.meanwhile():
            self.is_working = True
            self.begun.release()
            assert self.may_end.acquire(timeout=IDLE_S)
            self.is_working = False
        self._said.append("worked")
        return True

    def take_outbox(self) -> dict[str, list[Any]]:
        said, self._said = self._said, []
        return {"peer": said} if said else {}

    async def until_it_works(self) -> None:
        async with asyncio.timeout(10):
            while not self.begun.acquire(blocking=False):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running(model: Model, kind: type[SharingHost[Any]] = SteadyHost) -> AsyncIterator[SharingHost[Model]]:
    host = kind(model, (Light,), idle_wait_s=IDLE_S)
    model.meanwhile = host.meanwhile
    host.start()
    try:
        yield host
    finally:
        model.may_end.release(100)
        host.stop()


@pytest.mark.parametrize("kind", [SharingHost, SteadyHost])
async def test_light_messages_are_received_while_the_model_works(kind: type[SharingHost[Any]]) -> None:
    model = Model()
    async with running(model, kind) as host:
        host.post([Heavy("a")])
        await model.until_it_works()
        host.post([Light("b"), Light("c")])
        assert model.received == [("a", False), ("b", True), ("c", True)]


@pytest.mark.parametrize("kind", [SharingHost, SteadyHost])
async def test_others_wait_for_the_end_of_the_step_and_are_not_overtaken(kind: type[SharingHost[Any]]) -> None:
    model = Model()
    async with running(model, kind) as host:
        host.post([Heavy("a")])
        await model.until_it_works()
        host.post([Light("b"), Heavy("c")])
        host.post([Light("d")])
        assert model.received == [("a", False)]
        model.may_end.release()
        await model.until_it_works()
        assert model.received == [("a", False), ("b", False), ("c", False), ("d", False)]


async def test_what_a_step_said_is_sent_while_the_next_one_works() -> None:
    model = Model()
    async with running(model) as host:
        mailbox = host.attach("peer")
        host.post([Heavy("a"), Heavy("b")])
        batches = mailbox.batches(IDLE_S)
        await model.until_it_works()
        assert await anext(batches) == ("got a", "got b")
        model.may_end.release()
        await model.until_it_works()
        assert await anext(batches) == ("worked",)
        host.post([Light("c")])
        model.may_end.release()
        assert await anext(batches) == ("got c", "worked")


async def test_what_a_step_said_is_sent_at_once_where_no_model_is_to_work_without_a_pause() -> None:
    model = Model()
    async with running(model, SharingHost) as host:
        mailbox = host.attach("peer")
        host.post([Heavy("a"), Heavy("b"), Heavy("c")])
        batches = mailbox.batches(IDLE_S)
        model.may_end.release()
        assert await anext(batches) == ("got a", "got b", "got c", "worked")
        await model.until_it_works()
        host.post([Light("d")])  # the answer waits for the end of the step
        model.may_end.release(2)
        assert (await anext(batches))[:2] == ("got d", "worked")


async def test_what_the_loop_had_no_time_for_is_sent_with_the_next_step() -> None:
    model = Model()
    async with running(model) as host:
        mailbox = host.attach("peer")
        host.post([Heavy("a"), Heavy("b"), Heavy("c")])
        model.may_end.release(2)
        for _ in range(3):  # the loop is held all the while
            assert model.begun.acquire(timeout=IDLE_S)
        assert mailbox.take() == ("got a", "got b", "got c", "worked", "worked")


async def test_a_failure_while_the_model_works_ends_the_machine_and_its_links() -> None:
    model = Model()
    async with running(model) as host:
        mailbox = host.attach("peer")
        host.post([Heavy("a"), Heavy("b")])
        await model.until_it_works()
        host.post([Light("poison")])
        with pytest.raises(HostFailedError, match="poisoned"):
            host.check(stall_s=IDLE_S)
        assert mailbox.closed
        model.may_end.release(2)
        host.stop()
        assert not model.begun.acquire(blocking=False)  # the second step was not begun


@pytest.mark.skipif(not may_go_on_at_once(), reason="the system does not allow real time")
async def test_its_thread_goes_on_in_real_time_between_two_steps() -> None:
    policies: list[int] = []

    class Noting(Model):
        def step(self, now_s: float) -> bool:
            worked = super().step(now_s)
            policies.append(os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK)
            return worked

    model = Noting()
    async with running(model) as host:
        host.post([Heavy("one")])
        await model.until_it_works()
        policies.clear()
        model.may_end.release()
        async with asyncio.timeout(10):
            while not policies:
                await asyncio.sleep(0.001)
    assert policies[0] == os.SCHED_RR


async def test_messages_without_a_step_are_answered_at_once() -> None:
    model = Model()
    async with running(model) as host:
        mailbox = host.attach("peer")
        host.post([Light("a")])
        assert await anext(mailbox.batches(IDLE_S)) == ("got a",)


async def test_its_thread_goes_first_once_the_model_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, noted = Model(), []

    class Noted(Precedence):
        @contextmanager
        def after_waiting(self) -> Iterator[None]:
            noted.append((threading.current_thread().name, model.is_working))
            with super().after_waiting():
                yield
                noted.append((threading.current_thread().name, model.is_working))

    monkeypatch.setattr(host_module, "Precedence", Noted)
    async with running(model) as host:
        for _ in range(2):
            host.post([Heavy("go")])
            await model.until_it_works()
            model.may_end.release()
        async with asyncio.timeout(10):
            while len(noted) < 4:
                await asyncio.sleep(0.001)
    assert noted == [("machine", False)] * 4
