"""Hosts: what gives a state machine its time, its messages and its peers.

``WorkerHost`` runs a machine whose steps take long (torch) on a thread of its own, so that the event loop only passes
messages. ``LoopHost`` runs one whose steps are short on the event loop itself, which saves the hops between threads.

A box of messages between whoever produces them, on any thread, and one reader on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from deployments.transport.wire import Batch, HostFailedError


class Mailbox:
    """Messages on their way to one peer. Everything that is pending is read as one batch.

    To be created on the event loop of the reader.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._lock = threading.Lock()
        self._messages: list[Any] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nobody will read what is put from now on."""
        return self._closed

    def put(self, messages: Iterable[Any]) -> bool:
        """Add messages, from any thread. False if the box is closed: they are lost."""
        with self._lock:
            if self._closed:
                return False
            wake = not self._messages
            self._messages.extend(messages)
        if wake:
            self._wake()
        return True

    def close(self) -> None:
        """End the reader after what is pending, from any thread; closing twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake()

    def take(self) -> Batch:
        """Everything pending, without waiting; on the event loop."""
        self._changed.clear()
        with self._lock:
            messages, self._messages = self._messages, []
            if self._closed:
                self._changed.set()
        return tuple(messages)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its readers are gone with it
            self._loop.call_soon_threadsafe(self._changed.set)

    async def wait(self) -> None:
        """Wait until something is pending or the box is closed."""
        await self._changed.wait()

    async def batches(self, heartbeat_s: float) -> AsyncGenerator[Batch, None]:
        """Batches as soon as there are any, until the box is closed; an empty one every ``heartbeat_s`` of silence."""
        while True:
            try:
                async with asyncio.timeout(heartbeat_s):
                    await self.wait()
            except TimeoutError:
                yield ()
                continue
            batch = self.take()
            if batch:
                yield batch
            elif self._closed:
                return


logger = logging.getLogger("ray.serve")

DRAIN_POLL_S = 0.1
"""How often a draining machine is asked whether it is done."""
MOST_ACTIONS = 32
"""Messages and other things that a machine on an event loop does in one turn: some milliseconds at most."""


class Machine(Protocol):
    """A state machine, as whoever drives it sees it."""

    def receive(self, message: Any, now_s: float) -> None:
        """Take in one message."""
        ...

    def step(self, now_s: float) -> bool:
        """Do a piece of work; True if there may be more."""
        ...

    def take_outbox(self) -> dict[str, list[Any]]:
        """Messages since the last call, by peer id."""
        ...

    def unsendable(self, message: Any, reason: str, now_s: float) -> None:
        """A message that it has put out is too long to be sent; what it was for ends with an error."""
        ...

    def drain(self, now_s: float) -> None:
        """Take nothing new from now on."""
        ...

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left to finish."""
        ...


M = TypeVar("M", bound=Machine)
T = TypeVar("T")
Action = Callable[[M, float], None]
"""Something to do with the machine in its turn, given the time."""


class Host(ABC, Generic[M]):
    """Drives one machine and keeps a mailbox per linked peer.

    Attributes:
        num_dropped_messages: Messages for peers without a link; the protocol allows for their loss.
        on_failed: Called once on the event loop with what the machine raised; nothing is done with it from then on.
    """

    def __init__(self, machine: M) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine = machine
        self._mailboxes: dict[str, Mailbox] = {}
        self._failure: Exception | None = None
        self._is_stopped = False
        self.last_progress_s = time.monotonic()
        self.num_dropped_messages = 0
        self.on_failed: Callable[[Exception], None] | None = None

    @abstractmethod
    def start(self) -> None:
        """Start driving the machine; on the event loop."""

    @abstractmethod
    def stop(self) -> None:
        """End it after its running step, for which it does not wait, and the links; idempotent."""

    @abstractmethod
    def post(self, messages: Iterable[Any]) -> None:
        """Hand messages to the machine."""

    @abstractmethod
    def tell(self, action: Action[M]) -> None:
        """Have ``action(machine, now_s)`` done in the machine's turn, in order with the messages."""

    def unsendable(self, message: Any, reason: str) -> None:
        """A message of the machine's is too long for any link: it learns that, and nothing else ends."""
        logger.warning("Message not sent: %s", reason)
        self.tell(lambda machine, now_s: machine.unsendable(message, reason, now_s))

    def attach(self, peer: str) -> Mailbox:
        """A new mailbox for what the machine sends to ``peer``; an older one is closed."""
        self._close(peer)
        mailbox = self._mailboxes[peer] = Mailbox()
        return mailbox

    def detach(self, peer: str, mailbox: Mailbox) -> None:
        """Close a mailbox; ``peer`` is unlinked unless it has another by now."""
        mailbox.close()
        if self._mailboxes.get(peer) is mailbox:
            del self._mailboxes[peer]

    def unlink_all(self) -> None:
        """Close all mailboxes, which ends every link."""
        for peer in list(self._mailboxes):
            self._close(peer)

    @property
    def failed(self) -> bool:
        """Whether the machine has raised."""
        return self._failure is not None

    def check(self, step_timeout_s: float) -> None:
        """Whether the machine is well.

        Raises:
            HostFailedError: It has raised, or for more than ``step_timeout_s`` there was no sign of progress.
        """
        if self._failure is not None:
            raise HostFailedError(f"the replica failed: {self._failure!r}") from self._failure

    async def ask(self, question: Callable[[M], T]) -> T:
        """What ``question(machine)`` gives in the machine's turn; an exception of it is the caller's.

        There is no answer from a machine that has failed, or is stopped: callers bound the wait.
        """
        answer: asyncio.Future[T] = self._loop.create_future()

        def give(value: T | None, error: Exception | None) -> None:
            if answer.cancelled():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(cast(T, value))

        def put(machine: M, _now_s: float) -> None:
            try:
                self._on_loop(give, question(machine), None)
            except Exception as error:
                self._on_loop(give, None, error)

        self.tell(put)
        return await answer

    async def drain(self) -> None:
        """Have the machine take nothing new; returns when it has nothing left."""
        drained = asyncio.Event()
        self.tell(lambda machine, now_s: machine.drain(now_s))

        def ask(machine: M, _now_s: float) -> None:
            if machine.is_drained:
                self._on_loop(drained.set)

        while not (drained.is_set() or self.failed or self._is_stopped):
            self.tell(ask)
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_POLL_S):
                    await drained.wait()

    def _close(self, peer: str) -> None:
        mailbox = self._mailboxes.pop(peer, None)
        if mailbox is not None:
            mailbox.close()

    def _turn(self, items: Iterable[Action[M]]) -> bool:
        """One turn of the machine: what came, a step, what goes out."""
        now_s = time.monotonic()
        for item in items:
            item(self._machine, now_s)
        busy = self._machine.step(time.monotonic())
        self._send()
        self.last_progress_s = time.monotonic()
        return busy

    def _send(self) -> None:
        for peer, messages in self._machine.take_outbox().items():
            mailbox = self._mailboxes.get(peer)
            if mailbox is None or not mailbox.put(messages):
                self.num_dropped_messages += len(messages)

    def _fail(self, failure: Exception) -> None:
        logger.error("This replica failed: Serve replaces it, and its sequences go on elsewhere.", exc_info=failure)
        self._failure = failure
        self.unlink_all()
        if self.on_failed is not None:
            self._on_loop(self.on_failed, failure)

    def _on_loop(self, callback: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)


def _receive(messages: Iterable[Any], machine: Machine, now_s: float) -> None:
    for message in messages:
        machine.receive(message, now_s)


_SWITCH_INTERVAL_S = 2e-4
"""How long a thread may hold the interpreter while another waits for it. With Python's own 5 ms the thread of a machine
could wait as long as a step of its model takes once its device is done, while the event loop writes answers."""


class WorkerHost(Host[M]):
    """Runs a machine on a thread of its own; ``post`` and ``tell`` may be called from any thread.

    Args:
        machine: The machine; nobody else may touch it after ``start``.
        idle_wait_s: How long the thread waits for messages after a step that did nothing, before the next: the
            precision of the machine's timers.
        last_progress: Gives the monotonic time of the newest sign of progress within a running step, in seconds.
    """

    def __init__(
        self,
        machine: M,
        *,
        idle_wait_s: float = 0.005,
        last_progress: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(machine)
        self._idle_wait_s = idle_wait_s
        self._last_progress = last_progress
        self._inbox: queue.SimpleQueue[Action[M]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="machine", daemon=True)

    def start(self) -> None:
        """Start the thread. Threads of the process give way to it sooner from then on."""
        self.last_progress_s = time.monotonic()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its running step, for which nobody waits, and the links."""
        self._is_stopped = True
        self._inbox.put(lambda _machine, _now_s: None)
        self.unlink_all()

    def check(self, step_timeout_s: float) -> None:
        """Whether the machine is well, and has not been still for longer than ``step_timeout_s``."""
        super().check(step_timeout_s)
        last_s = self.last_progress_s
        if self._last_progress is not None:
            last_s = max(last_s, self._last_progress())
        idle_s = time.monotonic() - last_s
        if idle_s > step_timeout_s:
            raise HostFailedError(f"no progress for {idle_s:.1f} s; step_timeout_s allows {step_timeout_s:g} s")

    def post(self, messages: Iterable[Any]) -> None:
        """Hand messages to the machine, from any thread; no step comes between those of one call."""
        messages = tuple(messages)
        self.tell(partial(_receive, messages))

    def tell(self, action: Action[M]) -> None:
        """Have ``action(machine, now_s)`` done on the machine's thread before its next step."""
        self._inbox.put(action)

    def _run(self) -> None:
        busy = True
        try:
            while not self._is_stopped:
                busy = self._turn(self._pending(0.0 if busy else self._idle_wait_s))
        except Exception as failure:
            self._fail(failure)

    def _pending(self, wait_s: float) -> list[Action[M]]:
        items: list[Action[M]] = []
        try:
            items.append(self._inbox.get(wait_s > 0, wait_s))
            while True:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            return items


class LoopHost(Host[M]):
    """Runs a machine on the event loop, for what came in one turn of the loop or, if that is much, for a part of it.

    Args:
        machine: The machine; its steps must be short.
        tick_s: Longest time between two steps: the precision of the machine's timers.
        after: Called with the machine after every turn, to take what is not a message.
    """

    def __init__(
        self,
        machine: M,
        *,
        tick_s: float = 0.05,
        after: Callable[[M], None] | None = None,
    ) -> None:
        super().__init__(machine)
        self._tick_s = tick_s
        self._after = after
        self._inbox: deque[Action[M]] = deque()
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._context = contextvars.Context()

    def start(self) -> None:
        """Start the timers."""
        self._tick()

    def stop(self) -> None:
        """End the timers and the links; what comes later is dropped."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._woken = True
        self.unlink_all()

    def post(self, messages: Iterable[Any]) -> None:
        """Hand messages to the machine; on the event loop."""
        messages = tuple(messages)
        for message in messages:
            self.tell(partial(_receive, (message,)))

    def tell(self, action: Action[M]) -> None:
        """Have ``action(machine, now_s)`` done before the machine's next step; on the event loop."""
        self._inbox.append(action)
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._run, context=self._context)

    def _tick(self) -> None:
        self._wake()
        self._timer = self._loop.call_later(self._tick_s, self._tick, context=self._context)

    def _run(self) -> None:
        self._woken = False
        items = [self._inbox.popleft() for _ in range(min(len(self._inbox), MOST_ACTIONS))]
        try:
            busy = self._turn(items)
            if self._after is not None:
                self._after(self._machine)
        except Exception as failure:
            self._fail(failure)
            self.stop()
        else:
            if busy or self._inbox:
                self._wake()
