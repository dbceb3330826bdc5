"""What has come for open sequences, given out no more often than HTTP passes it on cheaply."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from deployments.openai.service import TokenDelta


class Inbox:
    """What has come for one sequence since its reader took the last, as one delta.

    Each delta taken costs a piece of text, an event, and its way through Serve's proxy, whatever it holds. So after
    each there is a pause, in which what comes is gathered; but never the end of a sequence, nor what comes first.

    Args:
        pause_s: Gives the least time between two deltas, in seconds.
    """

    def __init__(self, pause_s: Callable[[], float]) -> None:
        self._pause_s = pause_s
        self._held: TokenDelta | None = None
        self._has_some, self._has_end = asyncio.Event(), asyncio.Event()
        self._taken_s = -math.inf

    def put(self, delta: TokenDelta) -> None:
        """Add to what is held; on the event loop."""
        self._held = delta if self._held is None else self._held + delta
        self._has_some.set()
        if delta.finish is not None:
            self._has_end.set()

    async def take(self) -> TokenDelta:
        """All that has come, as soon as there is something and the pause is over; for one reader."""
        await self._has_some.wait()
        clock = asyncio.get_running_loop().time
        rest_s = self._taken_s + self._pause_s() - clock()
        if rest_s > 0 and not self._has_end.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._has_end.wait()
        taken, self._held = self._held, None
        assert taken is not None, "there is one reader"
        self._has_some.clear()
        self._taken_s = clock()
        return taken
