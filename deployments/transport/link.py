"""One link: a two-way path for batches of messages between two replicas.

The caller says Hello, the callee answers with a Greeting; then batches and heartbeats go both ways until either side
ends, dies or falls silent, which ends the link on both.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from deployments.transport.host import Host, Mailbox
from deployments.transport.wire import (
    WIRE_VERSION,
    FingerprintKind,
    FrameReader,
    Greeting,
    Hello,
    LinkError,
    LinkRefusedError,
    LinkTimes,
    Messages,
    OtherModelError,
    decode,
    encode,
    frames,
    mismatch,
)
from specdec.core.types import Fingerprints

logger = logging.getLogger("ray.serve")

_LONG_FRAME_BYTES = 64 << 10

PeerEvent = Callable[[str], None]
"""Called on the event loop with the peer's replica id."""


class Channel(Protocol):
    """One end of what carries a link."""

    async def send(self, frame: bytes) -> None:
        """Send a frame; returns when it may take the next.

        Raises:
            LinkError: The other end is gone.
        """
        ...

    async def receive(self) -> bytes:
        """The next frame.

        Raises:
            LinkError: The other end is gone, or sent what is no frame.
        """
        ...

    def close(self) -> None:
        """End it for both sides; idempotent."""
        ...


def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task outside of any request.

    Serve takes calls made in a request's context for a part of that request: it cancels them with it, and routes two
    at a time wrongly, as both have the request's id.
    """
    return asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())


async def carry(channel: Channel, peer: str, host: Host[Any], mailbox: Mailbox, times: LinkTimes) -> None:
    """Carry batches both ways until the link ends.

    Raises:
        LinkError: It has ended; the reason.
    """

    async def read() -> None:
        reader = FrameReader()
        while True:
            frame = await _receive(channel, peer, times.peer_timeout_s)
            batch = reader.decode(frame, Messages).batch
            if batch:
                host.post(batch)
            if len(frame) > _LONG_FRAME_BYTES:
                await asyncio.sleep(0)  # others have their turn before the next frame is decoded

    async def write() -> None:
        async for batch in mailbox.batches(times.heartbeat_s):
            for frame in frames(batch, host.unsendable):
                await channel.send(frame)
                if len(frame) > _LONG_FRAME_BYTES:
                    await asyncio.sleep(0)
        raise LinkError("this side ended the link")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            group.create_task(write())
    except ExceptionGroup as ended:
        raise ended.exceptions[0] from ended


async def _receive(channel: Channel, peer: str, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            return await channel.receive()
    except TimeoutError as error:
        raise LinkError(f"{peer or 'the caller'} is silent") from error


class Dialer:
    """The caller's end of links to the replicas of one deployment.

    Args:
        me: Replica id of this replica.
        deployment: Name of its deployment.
        application: Name of its application.
        fingerprints: What its models are.
        match: Which fingerprint must be the callee's, too.
        host: Gets what the callees send.
        open_channel: Opens a channel to ``hello.callee`` and sends ``hello``, or raises ``LinkError``.
        times: How patient to be.
    """

    def __init__(
        self,
        me: str,
        deployment: str,
        application: str,
        fingerprints: Fingerprints,
        match: FingerprintKind,
        host: Host[Any],
        open_channel: Callable[[Hello], Awaitable[Channel]],
        times: LinkTimes,
    ) -> None:
        self._me = me
        self._deployment = deployment
        self._application = application
        self._fingerprints = fingerprints
        self._match = match
        self._host = host
        self._open_channel = open_channel
        self._times = times

    async def dial(self, peer: str, on_up: Callable[[], None]) -> None:
        """Run one link; it never returns as long as the link is up.

        Args:
            peer: Replica id to link with.
            on_up: Called once, when messages can travel both ways.

        Raises:
            LinkError: The link ended, or could not be opened.
        """
        if self._host.failed:
            raise LinkError("the replica has failed")
        channel = await self._open(peer)
        mailbox = self._host.attach(peer)
        try:
            on_up()
            await carry(channel, peer, self._host, mailbox, self._times)
        finally:
            self._host.detach(peer, mailbox)
            channel.close()

    async def _open(self, peer: str) -> Channel:
        """A channel whose callee has greeted us."""
        hello = Hello(self._me, peer, self._deployment, self._fingerprints, WIRE_VERSION, self._application)
        channel = None
        try:
            async with asyncio.timeout(self._times.open_timeout_s):
                channel = await self._open_channel(hello)
                self._accept(decode(await channel.receive(), Greeting), peer)
        except BaseException as error:
            if channel is not None:
                channel.close()
            if isinstance(error, TimeoutError):
                raise LinkError(f"{peer} is silent") from error
            raise
        return channel

    def _accept(self, greeting: Greeting, callee: str) -> None:
        if greeting.replica != callee:
            raise LinkRefusedError(f"{greeting.replica} answered in place of {callee}")
        other_model = mismatch(self._fingerprints, greeting.fingerprints, self._match, greeting.wire)
        if other_model:
            raise OtherModelError(f"{callee} refused: {other_model}")
        if greeting.refusal:
            raise LinkRefusedError(f"{callee} refused: {greeting.refusal}")


class Answerer:
    """The callee's end of all its links.

    Args:
        me: Replica id of this replica.
        fingerprints: What its models are.
        host: Gets what the callers send.
        refusal: Why a call is refused; empty if it is not.
        on_linked: Called, with the caller's Hello, when a link is up.
        on_lost: Called when a link that was up has ended, once for each ``on_linked``.
        times: How patient to be.
    """

    def __init__(
        self,
        me: str,
        fingerprints: Fingerprints,
        host: Host[Any],
        refusal: Callable[[Hello], str],
        on_linked: Callable[[Hello], None],
        on_lost: Callable[[Hello], None],
        times: LinkTimes,
    ) -> None:
        self._me = me
        self._fingerprints = fingerprints
        self._host = host
        self._refusal = refusal
        self._on_linked = on_linked
        self._on_lost = on_lost
        self._times = times
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def answer(self, channel: Channel) -> None:
        """Run the link that a caller opens, from its Hello to its end; returns why it ended nowhere but in the log."""
        caller = "a caller"
        try:
            hello = decode(await _receive(channel, "", self._times.open_timeout_s), Hello)
            caller = hello.caller
            refusal = self._refusal(hello)
            await channel.send(encode(Greeting(self._me, self._fingerprints, refusal, WIRE_VERSION)))
            if not refusal:
                await self._run(hello, channel)
        except LinkError as error:
            logger.info("The link from %s ended: %s", caller, error)
        finally:
            channel.close()

    async def _run(self, hello: Hello, channel: Channel) -> None:
        while (older := self._running.get(hello.caller)) is not None:  # its caller has given it up
            older.cancel()
            await asyncio.wait([older])
        task = asyncio.current_task()
        assert task is not None
        self._running[hello.caller] = task
        mailbox = self._host.attach(hello.caller)
        self._on_linked(hello)
        try:
            await carry(channel, hello.caller, self._host, mailbox, self._times)
        finally:
            del self._running[hello.caller]
            self._host.detach(hello.caller, mailbox)
            self._on_lost(hello)
