"""Keeping links up: who is dialled, and when again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from deployments.transport.link import PeerEvent, spawn
from deployments.transport.wire import LinkTimes, OtherModelError

logger = logging.getLogger("ray.serve")


class LinkKeeper:
    """Dials every replica that is listed, and again when its link is lost.

    A replica that is listed no more is dialled no more, but a link that is up stays until it ends by itself: the
    replica may be draining, or the list may be wrong while Serve's controller recovers.

    Args:
        dial: Opens a link and runs it to its end (``Dialer.dial``).
        on_linked: Told when a link is up.
        on_lost: Told when a link that was up has ended, once for each ``on_linked``; and when a peer of which
            ``on_refused`` was told is listed no more.
        times: Pauses between attempts.
        on_refused: Told when a peer is found to be of another model.
    """

    def __init__(
        self,
        dial: Callable[[str, Callable[[], None]], Awaitable[None]],
        on_linked: PeerEvent,
        on_lost: PeerEvent,
        times: LinkTimes,
        on_refused: PeerEvent | None = None,
    ) -> None:
        self._dial = dial
        self._on_refused = on_refused
        self._on_linked = on_linked
        self._on_lost = on_lost
        self._times = times
        self._listed: frozenset[str] = frozenset()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._linked: set[str] = set()
        self._other_models: set[str] = set()

    @property
    def linked(self) -> frozenset[str]:
        """Peers whose link is up."""
        return frozenset(self._linked)

    def update(self, replica_ids: frozenset[str]) -> None:
        """Dial these replicas from now on, and no others."""
        self._listed = replica_ids
        for peer in self._tasks.keys() - replica_ids - self._linked:
            self._tasks.pop(peer).cancel()
        for peer in self._other_models - replica_ids:
            self._other_models.discard(peer)
            self._on_lost(peer)
        for peer in sorted(replica_ids - self._tasks.keys()):
            self._tasks[peer] = spawn(self._keep(peer))

    def close(self) -> None:
        """Cut all links."""
        self._listed = frozenset()
        while self._tasks:
            self._tasks.popitem()[1].cancel()

    async def _keep(self, peer: str) -> None:
        backoff_s, told = self._times.first_backoff_s, ""
        while True:
            was_up, reason = await self._run(peer)
            if was_up:
                logger.warning("The link to %s is lost: %s", peer, reason)
            elif reason != told:  # once, not at each attempt
                logger.warning("No link to %s, which is dialled on: %s", peer, reason)
            told = "" if was_up else reason
            if peer not in self._listed:
                self._tasks.pop(peer, None)
                return
            backoff_s = self._times.first_backoff_s if was_up else min(2 * backoff_s, self._times.max_backoff_s)
            await asyncio.sleep(backoff_s)

    async def _run(self, peer: str) -> tuple[bool, str]:
        """One link, from its opening to its end: whether it was up, and why it is not."""

        def up() -> None:
            self._linked.add(peer)
            self._other_models.discard(peer)
            logger.info("Linked to %s.", peer)
            self._on_linked(peer)

        reason = "it ended"
        try:
            await self._dial(peer, up)
        except OtherModelError as error:
            reason = str(error)
            if peer in self._listed - self._other_models and self._on_refused is not None:
                self._other_models.add(peer)
                self._on_refused(peer)
        except Exception as error:
            reason = str(error) or repr(error)
        finally:
            was_up = peer in self._linked
            if was_up:
                self._linked.discard(peer)
                self._on_lost(peer)
        return was_up, reason
