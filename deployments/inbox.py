"""What has come for an open sequence and was not taken yet."""

from __future__ import annotations

import asyncio

from deployments.http.service import TokenDelta


class Inbox:
    """What has come for one sequence since its reader took the last, as one delta.

    A reader whose client is slow, or whose turn comes late, finds more of it at once; nobody waits for more to come.
    """

    def __init__(self) -> None:
        self._held: TokenDelta | None = None
        self._has_some = asyncio.Event()

    def put(self, delta: TokenDelta) -> None:
        """Add to what is held; on the event loop."""
        self._held = delta if self._held is None else self._held + delta
        self._has_some.set()

    async def take(self) -> TokenDelta:
        """All that has come, as soon as there is something; for one reader."""
        await self._has_some.wait()
        taken, self._held = self._held, None
        assert taken is not None, "there is one reader"
        self._has_some.clear()
        return taken
