"""Hosts: what a machine is given, what comes out of it, and what happens when it fails or hangs."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deployments.transport.host import Host, LoopHost, WorkerHost
from deployments.transport.wire import HostFailedError
from specdec.executor.staging import Field, Layout, Record
from specdec.kernels.progress import StepProgress
from tests.waiting import eventually

IDLE_S = 60.0
"""Longer than any test: whatever happens sooner was not a timer's doing."""


class Recorder:
    """Answers every message to its sender, does some work for it, and notes who called it."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.threads: set[int] = set()
        self.steps = 0
        self.work = 0
        self.on_step: Callable[[], None] = lambda: None
        self._outbox: dict[str, list[Any]] = defaultdict(list)

    def receive(self, message: Any, now_s: float) -> None:
        if message == "poison":
            raise ValueError("poisoned")
        self.threads.add(threading.get_ident())
        self.received.append(message)
        peer, text = message
        self._outbox[peer].append(f"re: {text}")

    def step(self, now_s: float) -> bool:
        self.threads.add(threading.get_ident())
        self.steps += 1
        self.on_step()
        self.work = max(0, self.work - 1)
        return self.work > 0

    def take_outbox(self) -> dict[str, list[Any]]:
        outbox, self._outbox = self._outbox, defaultdict(list)
        return outbox


@contextmanager
def running(kind: str, machine: Recorder, timer_s: float = IDLE_S) -> Iterator[Host[Recorder]]:
    host: Host[Recorder] = (
        WorkerHost(machine, idle_wait_s=timer_s) if kind == "worker" else LoopHost(machine, tick_s=timer_s)
    )
    host.start()
    try:
        yield host
    finally:
        host.stop()


both_kinds = pytest.mark.parametrize("kind", ["worker", "loop"])


@both_kinds
async def test_answers_go_to_the_mailbox_of_their_peer(kind: str) -> None:
    with running(kind, Recorder()) as host:
        a, b = host.attach("a"), host.attach("b")
        host.post([("a", 1), ("b", 2), ("a", 3)])
        assert await anext(a.batches(IDLE_S)) == ("re: 1", "re: 3")
        assert await anext(b.batches(IDLE_S)) == ("re: 2",)


@both_kinds
async def test_messages_for_peers_without_a_link_are_dropped_and_counted(kind: str) -> None:
    with running(kind, Recorder()) as host:
        mailbox = host.attach("a")
        host.detach("a", mailbox)
        host.post([("a", 1), ("a", 2), ("b", 3)])
        await eventually(lambda: host.num_dropped_messages == 3)


@both_kinds
async def test_a_new_link_to_a_peer_ends_the_old_one_alone(kind: str) -> None:
    with running(kind, Recorder()) as host:
        old = host.attach("a")
        new = host.attach("a")
        assert old.closed
        host.detach("a", old)
        host.post([("a", 1)])
        assert await anext(new.batches(IDLE_S)) == ("re: 1",)


@both_kinds
async def test_it_steps_again_at_once_while_there_is_work(kind: str) -> None:
    machine = Recorder()
    with running(kind, machine) as host:
        host.tell(lambda m, _now_s: setattr(m, "work", 20))
        await eventually(lambda: machine.steps >= 20)


@both_kinds
async def test_timers_run_without_messages(kind: str) -> None:
    machine = Recorder()
    with running(kind, machine, timer_s=0.001):
        await eventually(lambda: machine.steps >= 20)


@both_kinds
async def test_a_failure_is_kept_told_once_and_ends_the_links(kind: str) -> None:
    told: list[tuple[int, str]] = []
    with running(kind, Recorder()) as host:
        host.on_failed = lambda failure: told.append((threading.get_ident(), str(failure)))
        mailbox = host.attach("a")
        host.check(step_timeout_s=IDLE_S)
        host.post(["poison"])
        await eventually(lambda: host.failed)
        with pytest.raises(HostFailedError, match="poisoned"):
            host.check(step_timeout_s=IDLE_S)
        assert mailbox.closed
        host.post([("a", 1)])
        await eventually(lambda: bool(told))
        host.post(["poison"])
        await asyncio.sleep(0.02)
        assert told == [(threading.get_ident(), "poisoned")], "on the event loop"


async def test_a_worker_runs_on_one_thread_of_its_own_and_stops() -> None:
    machine = Recorder()
    with running("worker", machine) as host:
        host.post([("a", 1)])
        host.tell(lambda m, _now_s: m.threads.add(threading.get_ident()))
        await eventually(lambda: machine.received == [("a", 1)])
    assert len(machine.threads) == 1
    assert threading.get_ident() not in machine.threads
    await eventually(lambda: "machine" not in {thread.name for thread in threading.enumerate()})


async def test_the_event_loop_goes_on_during_a_long_step_and_a_stall_is_told() -> None:
    machine, release = Recorder(), threading.Event()
    machine.on_step = lambda: release.wait(10) and None
    with running("worker", machine) as host:
        try:
            await eventually(lambda: machine.steps == 1)
            await asyncio.sleep(0.02)
            host.check(step_timeout_s=IDLE_S)
            with pytest.raises(HostFailedError, match="no progress"):
                host.check(step_timeout_s=0.01)
        finally:
            release.set()


async def test_a_machine_that_wakes_waits_less_than_a_millisecond_for_the_interpreter() -> None:
    sys.setswitchinterval(5e-3)
    host = WorkerHost(Recorder())
    try:
        host.start()
        assert sys.getswitchinterval() < 1e-3
    finally:
        host.stop()


async def test_progress_within_a_step_is_no_stall() -> None:
    machine, release = Recorder(), threading.Event()
    machine.on_step = lambda: release.wait(10) and None
    progress_s = 0.0
    host = WorkerHost(machine, last_progress=lambda: progress_s)
    host.start()
    try:
        await eventually(lambda: machine.steps == 1)
        await asyncio.sleep(0.05)
        with pytest.raises(HostFailedError, match="no progress"):
            host.check(step_timeout_s=0.04)
        progress_s = time.monotonic() + IDLE_S
        host.check(step_timeout_s=0.04)
    finally:
        release.set()
        host.stop()


async def test_a_step_that_waits_for_a_device_that_hangs_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches, of which the device does one; the step's thread sleeps until its record comes."""
    num_done, finished, gpu = 0, threading.Event(), torch.device("cuda")

    class Event:
        numbers = itertools.count(1)

        def __init__(self, blocking: bool = False) -> None:
            self.number = 0 if blocking else next(self.numbers)

        def record(self, _stream: object) -> None:
            pass

        def query(self) -> bool:
            return num_done >= self.number

        def synchronize(self) -> None:
            assert finished.wait(10)

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape, dtype=options["dtype"]))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    progress, record = StepProgress(), Record(Layout((Field("tokens", (2,)),)), gpu)

    def step() -> None:
        for _ in range(2):
            progress.advance(gpu)
        record.download()
        record.collect()

    machine = Recorder()
    machine.on_step = step
    host = WorkerHost(machine, last_progress=lambda: progress.newest_s)
    host.start()
    try:
        await eventually(lambda: record.num_under_way == 0 and machine.steps == 1)
        for num_done in (0, 1):
            host.check(step_timeout_s=IDLE_S if num_done == 0 else 0.04)
            await asyncio.sleep(0.05)
            with pytest.raises(HostFailedError, match=r"no progress for 0\.\d s; step_timeout_s allows 0.04"):
                host.check(step_timeout_s=0.04)
    finally:
        finished.set()
        host.stop()


async def test_stopping_waits_for_no_step() -> None:
    machine, release = Recorder(), threading.Event()
    machine.on_step = lambda: release.wait(10) and None
    host = WorkerHost(machine)
    host.start()
    await eventually(lambda: machine.steps == 1)
    host.stop()
    assert "machine" in {thread.name for thread in threading.enumerate()}, "the step goes on beside the event loop"
    release.set()
    await eventually(lambda: "machine" not in {thread.name for thread in threading.enumerate()})


class DrainingRecorder(Recorder):
    """Is drained when its work is done."""

    drains = 0

    def drain(self, now_s: float) -> None:
        self.threads.add(threading.get_ident())
        self.drains += 1

    @property
    def is_drained(self) -> bool:
        return self.drains > 0 and "done" in self.received


class DoneRecorder(DrainingRecorder):
    def receive(self, message: Any, now_s: float) -> None:
        self.received.append(message)


@both_kinds
async def test_draining_lasts_until_the_machine_is_drained(kind: str) -> None:
    machine = DoneRecorder()
    with running(kind, machine, timer_s=0.001) as host:
        drain = asyncio.create_task(host.drain())
        await eventually(lambda: machine.drains == 1)
        await asyncio.sleep(0.3)
        assert not drain.done()
        host.post(["done"])
        await eventually(drain.done)
        assert machine.drains == 1


@both_kinds
@pytest.mark.parametrize("how", ["failed", "stopped"])
async def test_draining_ends_with_the_machine(kind: str, how: str) -> None:
    machine = DrainingRecorder()
    with running(kind, machine, timer_s=0.001) as host:
        drain = asyncio.create_task(host.drain())
        await eventually(lambda: machine.drains == 1)
        if how == "failed":
            host.post(["poison"])
        else:
            host.stop()
        await eventually(drain.done)


async def test_a_turn_does_a_bounded_number_of_messages_and_others_have_theirs_between() -> None:
    machine, seen = Recorder(), []
    with running("loop", machine) as host:
        await asyncio.sleep(0)
        steps = machine.steps
        mailbox = host.attach("a")
        for start in (0, 50):
            host.post([("a", start + i) for i in range(50)])
        while not seen or seen[-1] < 100:
            seen.append(len(machine.received))
            await asyncio.sleep(0)
        assert seen == [0, 32, 64, 96, 100]
        assert machine.steps == steps + 4
        assert mailbox.take() == tuple(f"re: {i}" for i in range(100))


async def test_what_is_not_a_message_is_taken_after_each_turn() -> None:
    taken: list[int] = []
    host = LoopHost(Recorder(), tick_s=IDLE_S, after=lambda m: taken.append(len(m.received)))
    host.start()
    host.post([("a", 1)])
    await eventually(lambda: taken[-1:] == [1])
    host.stop()
