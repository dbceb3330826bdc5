"""What a stream's client has not taken yet: Serve takes messages at once, and holds them in a queue without a bound."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.types import Send

from deployments.http.errors import ClientGoneError

MAX_UNTAKEN_BYTES = 1 << 20
_MOST_TIME_S = 1.0
"""For what is larger: one message may be, and is taken a moment after it is sent."""
_MOST_PAUSE_S = 0.25


def queue_of(send: Send) -> deque[Any]:
    """The queue in which Serve holds what ``send`` took; an empty one if somebody else calls the application.

    Serve tells this nowhere: ``send`` is a function inside ``call_http_entrypoint`` of its replica.
    """
    names = getattr(getattr(send, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(send, "__closure__", None) or (), strict=True):
        if name == "result_queue":
            queue: deque[Any] = cell.cell_contents._message_queue
            return queue
    return deque()


class SlowClientError(ClientGoneError):
    """A client takes too little of its stream."""


class Untaken:
    """What was sent of one stream and not taken.

    Args:
        queue: Of :func:`queue_of`; whoever takes its messages takes them in order.
        timeout_s: A stream ends when a message stays in the queue for longer.
    """

    def __init__(self, queue: deque[Any], timeout_s: float) -> None:
        self._queue = queue
        self._timeout_s = timeout_s
        self._sent: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._num_bytes = 0

    def sent(self, num_bytes: int, taken: Callable[[], None]) -> None:
        """A message is in the queue; ``taken`` is called when it has been taken.

        Raises:
            SlowClientError: Messages stay there for too long, or for a second over 1 MiB of them. They are dropped.
        """
        self._sent.append((time.monotonic(), num_bytes, taken))
        self._num_bytes += num_bytes
        self._check()

    def count(self) -> None:
        """Call ``taken`` of all messages that were taken until now."""
        while len(self._sent) > len(self._queue):
            _, num_bytes, taken = self._sent.popleft()
            self._num_bytes -= num_bytes
            taken()

    async def until_taken(self) -> None:
        """Return when all was taken.

        Raises:
            SlowClientError: As ``sent``.
        """
        pause_s = 0.0
        self.count()
        while self._sent:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s + 0.005, _MOST_PAUSE_S)
            self._check()

    def _check(self) -> None:
        self.count()
        waited_s = time.monotonic() - self._sent[0][0] if self._sent else 0.0
        if self._num_bytes > MAX_UNTAKEN_BYTES and waited_s > _MOST_TIME_S:
            why = f"left {self._num_bytes} bytes, of {MAX_UNTAKEN_BYTES} at most"
        elif waited_s > self._timeout_s:
            why = f"took nothing for {self._timeout_s:g} s (limits.slow_client_timeout_s)"
        else:
            return
        self._queue.clear()
        self._sent.clear()
        raise SlowClientError(f"the client of a stream {why}")
