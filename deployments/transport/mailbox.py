"""A box of messages between whoever produces them, on any thread, and one reader on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from deployments.transport.wire import Batch


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
