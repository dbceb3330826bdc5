"""Hosts whose machines see to their messages while their models work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from deployments.transport.host import Action, M, WorkerHost
from deployments.transport.priority import GOES_FIRST


class SharingHost(WorkerHost[M]):
    """Runs a machine on a thread of its own, and lets the event loop have it while that thread waits for the model.

    What can be done beside a step is not done between two: while the model works, light messages are received on the
    event loop. The machine must call ``meanwhile`` around its model's work. What it says is sent after each step.

    Args:
        machine: As for :class:`WorkerHost`.
        light: Types of the messages that the machine may receive while its model works.
        idle_wait_s: As for :class:`WorkerHost`.
        clock: As for :class:`WorkerHost`.
    """

    def __init__(
        self,
        machine: M,
        light: tuple[type, ...],
        *,
        idle_wait_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(machine, idle_wait_s=idle_wait_s, clock=clock)
        self._light = light
        self._turn_lock = threading.Lock()
        self._is_shared = False

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Around what the machine waits for, on its own thread."""
        self._is_shared = True
        self._turn_lock.release()
        try:
            self._while_shared()
            with super().meanwhile():
                yield
        finally:
            self._turn_lock.acquire()
            self._is_shared = False

    def post(self, messages: Iterable[Any]) -> None:
        """Hand messages to the machine; on the event loop. In order: light ones do not overtake others."""
        messages = tuple(messages)
        may_be_early = self._inbox.empty() and all(isinstance(message, self._light) for message in messages)
        if not (may_be_early and self._on_the_loop(lambda: self._take_in(messages))):
            super().post(messages)

    def _turn(self, items: Iterable[Action[M]]) -> bool:
        with self._turn_lock:
            return super()._turn(items)

    def _while_shared(self) -> None:
        """What is to be done when the event loop may have the machine."""

    def _take_in(self, messages: tuple[Any, ...]) -> None:
        if self.on_arrival is not None:
            self.on_arrival(messages)
        now_s = self._clock()
        for message in messages:
            self._machine.receive(message, now_s)

    def _on_the_loop(self, action: Callable[[], None]) -> bool:
        """Do it now if the machine is to be had: not while it has its own turn, which may take long."""
        if not self._turn_lock.acquire(blocking=False):
            return False
        try:
            if not self._is_shared:
                return False
            action()
        except Exception as failure:
            self._stopping.set()
            self._fail(failure)
        finally:
            self._turn_lock.release()
        return True


class SteadyHost(SharingHost[M]):
    """A sharing host for a machine whose model is to work without a pause.

    What the machine has to say of a step is taken from it on the event loop, while the next one works; only where there
    is no next one it is sent at once. Between two steps the machine's thread goes first.
    """

    precedence = GOES_FIRST
    goes_at_once = True

    def __init__(
        self,
        machine: M,
        light: tuple[type, ...],
        *,
        idle_wait_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(machine, light, idle_wait_s=idle_wait_s, clock=clock)
        self._is_owed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; on the event loop."""
        self._loop = asyncio.get_running_loop()
        super().start()

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Around what the machine waits for, on its own thread."""
        if self._is_owed:  # the event loop had no time during the last step
            self._send()
        self._is_owed = True
        with super().meanwhile():
            yield

    def _while_shared(self) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_the_loop, self._send_owed)

    def _after_step(self, busy: bool) -> None:
        """What the machine says while it is busy is sent in its next turn, while its model works."""
        if not busy:
            self._is_owed = False
            self._send()

    def _send_owed(self) -> None:
        if self._is_owed:
            self._is_owed = False
            self._send()
