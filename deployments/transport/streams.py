"""What carries a link: Serve's gRPC transport.

The caller reads a streaming response of the callee (``link``) and sends by calls to it (``post``), one at a time. So
only callees have to be reachable through Serve. Serve puts its own envelope around each call.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from deployments.transport.discovery import Discovery, process_board
from deployments.transport.link import Channel, spawn
from deployments.transport.wire import Hello, LinkError, encode

_ID_BYTES = 16
_KNOWN, _UNKNOWN = b"\x01", b"\x00"


class StreamChannel:
    """The caller's end of a link over Serve."""

    def __init__(self, callees: Discovery, hello: Hello) -> None:
        self._id = uuid.uuid4().bytes
        self._post = callees.pinned("post", hello.callee, stream=False)
        self._response = callees.pinned("link", hello.callee, stream=True).remote(self._id + encode(hello))
        process_board().hold(self._id, hello.callee)

    async def send(self, frame: bytes) -> None:
        """Send a frame; see ``Channel``."""
        try:
            known = await self._post.remote(self._id + frame)
        except Exception as error:
            raise LinkError(f"a call failed: {error!r}") from error
        if known != _KNOWN:
            raise LinkError("the peer has no such link any more")

    async def receive(self) -> bytes:
        """The next frame; see ``Channel``."""
        try:
            return bytes(await anext(self._response))
        except StopAsyncIteration as error:
            raise LinkError("the peer ended the link") from error
        except Exception as error:
            raise LinkError(f"the stream failed: {error!r}") from error

    def close(self) -> None:
        """End the stream."""
        process_board().release(self._id)
        self._response.cancel()


async def dial_stream(callees: Discovery, hello: Hello) -> Channel:
    """Open a channel to a replica of a deployment, on any node."""
    return StreamChannel(callees, hello)


class ServedChannel:
    """The callee's end of a link over Serve.

    Attributes:
        inbox: Frames from the caller.
        outbox: Frames to the caller; None ends the stream.
    """

    def __init__(self, first: bytes) -> None:
        self.inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.inbox.put_nowait(first)
        self.outbox: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(self, frame: bytes) -> None:
        """Send a frame; see ``Channel``."""
        self.outbox.put_nowait(frame)
        await self.outbox.join()  # until Serve has taken it, so that later messages gather in one batch

    async def receive(self) -> bytes:
        """The next frame; see ``Channel``."""
        return await self.inbox.get()

    def close(self) -> None:
        """End the stream."""
        self.outbox.put_nowait(None)


class StreamAnswerer:
    """Takes channels as calls of Serve's.

    Args:
        answer: Runs the link of a channel to its end.
    """

    def __init__(self, answer: Callable[[Channel], Coroutine[Any, Any, None]]) -> None:
        self._answer = answer
        self._channels: dict[bytes, ServedChannel] = {}

    async def link(self, first: bytes) -> AsyncGenerator[bytes, None]:
        """What the caller of a new link reads, until the link ends."""
        name, hello = first[:_ID_BYTES], first[_ID_BYTES:]
        channel = self._channels[name] = ServedChannel(hello)
        task = spawn(self._answer(channel))
        try:
            while (frame := await channel.outbox.get()) is not None:
                yield frame
                channel.outbox.task_done()
        finally:
            del self._channels[name]
            task.cancel()

    def post(self, data: bytes) -> bytes:
        """A frame from a caller; answers whether there is its link."""
        channel = self._channels.get(data[:_ID_BYTES])
        if channel is None:
            return _UNKNOWN
        channel.inbox.put_nowait(data[_ID_BYTES:])
        return _KNOWN

    def close(self) -> None:
        """Close every link that this side accepted."""
        for channel in self._channels.values():
            channel.close()
