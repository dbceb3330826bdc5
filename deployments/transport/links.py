"""Links: two-way paths for batches of messages between two replicas, and who keeps them up.

A link is opened by one side and answered by the other. ``Dial`` is all that a way of travelling has to offer; the dials
over Serve's streams are in ``streams``, those within a machine in ``local``, one in memory is in ``memory``.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections.abc import AsyncIterable, Callable, Coroutine
from typing import Any, Protocol

from deployments.transport.wire import Batch, Greeting, Hello, LinkError, LinkRefusedError, LinkTimes

logger = logging.getLogger("ray.serve")

PeerEvent = Callable[[str], None]
"""Called on the event loop with the peer's replica id."""


class Dial(Protocol):
    """Opens a link to a peer and carries messages both ways until the link ends."""

    async def __call__(self, peer: str, on_up: Callable[[], None]) -> None:
        """Run one link.

        Args:
            peer: Replica id to link with.
            on_up: To be called once, when messages can travel both ways.

        Raises:
            LinkError: The link ended, or could not be opened. It never returns as long as the link is up.
        """
        ...


class Response(AsyncIterable[Any], Protocol):
    """What the other end says, item by item."""

    def cancel(self) -> None:
        """Nothing more is wanted of it."""
        ...


def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task outside of any request.

    Serve takes calls made in a request's context for a part of that request: it cancels them with it, and routes two
    at a time wrongly, as both have the request's id.
    """
    return asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())


async def until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first ends, then cancel the others; raises what it raised, or that it ended."""
    tasks = [spawn(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    failures = [error for task in done if not task.cancelled() and (error := task.exception()) is not None]
    raise failures[0] if failures else LinkError("the peer ended the link")


async def read_stream(
    response: Response,
    callee: str,
    times: LinkTimes,
    receive: Callable[[Batch], None],
    on_open: Callable[[], None] | None = None,
) -> None:
    """Read a stream until it ends; cancels the call in any case.

    Args:
        response: A greeting, where the callee was called, and batches.
        callee: Replica id of the other end.
        times: How patient to be.
        receive: Gets the batches, but for heartbeats.
        on_open: Called once, when the callee has greeted us.

    Raises:
        LinkRefusedError: The callee's greeting says so.
        LinkError: The stream failed, or was silent for too long.
    """
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(times.open_timeout_s) as limit:
            async for item in response:
                limit.reschedule(clock() + times.silence_s)
                if isinstance(item, Greeting):
                    _accept(item, callee)
                    if on_open is not None:
                        on_open()
                elif item:
                    receive(item)
    except LinkError:
        raise
    except TimeoutError as error:
        raise LinkError(f"{callee} is silent") from error
    except Exception as error:
        raise LinkError(f"the stream from {callee} failed: {error!r}") from error
    finally:
        response.cancel()


def _accept(greeting: Greeting, callee: str) -> None:
    if greeting.refusal is not None:
        raise LinkRefusedError(f"{greeting.replica} refused: {greeting.refusal}")
    if greeting.replica != callee:
        raise LinkRefusedError(f"{greeting.replica} answered in place of {callee}")


def new_hello(me: str, peer: str) -> Hello:
    """For a new attempt at a link."""
    return Hello(me, peer, uuid.uuid4().hex)


class LinkKeeper:
    """Keeps a link to every replica that is listed: opens it, reports it, opens it again when it is lost.

    Args:
        dial: How a link is opened and run.
        on_linked: Told when a link is up.
        on_lost: Told when a link that was up has ended, once for each ``on_linked``.
        times: Pauses between attempts.
    """

    def __init__(self, dial: Dial, on_linked: PeerEvent, on_lost: PeerEvent, times: LinkTimes) -> None:
        self._dial = dial
        self._on_linked = on_linked
        self._on_lost = on_lost
        self._times = times
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._linked: set[str] = set()

    @property
    def linked(self) -> frozenset[str]:
        """Peers whose link is up."""
        return frozenset(self._linked)

    def update(self, replica_ids: frozenset[str]) -> None:
        """Keep links to exactly these replicas; links to others are cut."""
        for peer in self._tasks.keys() - replica_ids:
            self._tasks.pop(peer).cancel()
        for peer in sorted(replica_ids - self._tasks.keys()):
            self._tasks[peer] = spawn(self._keep(peer))

    def close(self) -> None:
        """Cut all links; ``update`` opens them again."""
        self.update(frozenset())

    async def _keep(self, peer: str) -> None:
        backoff_s = self._times.first_backoff_s
        while True:
            was_up = await self._run(peer)
            backoff_s = self._times.first_backoff_s if was_up else min(2 * backoff_s, self._times.max_backoff_s)
            await asyncio.sleep(backoff_s)

    async def _run(self, peer: str) -> bool:
        """One link, from its opening to its end; True if it was up."""
        was_up = False

        def up() -> None:
            nonlocal was_up
            was_up = True
            self._linked.add(peer)
            logger.info("Linked to %s.", peer)
            self._on_linked(peer)

        try:
            await self._dial(peer, up)
        except Exception as error:
            level = logging.WARNING if was_up else logging.INFO
            logger.log(level, "The link to %s %s: %s", peer, "is lost" if was_up else "could not be opened", error)
        finally:
            if was_up:
                self._linked.discard(peer)
                self._on_lost(peer)
        return was_up
