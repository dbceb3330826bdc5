"""Machines, channels and waiting that the transport's tests share."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from deployments.transport.link import Answerer, Channel, spawn
from deployments.transport.wire import Hello, LinkError, encode
from specdec.core.messages import Cancel, Message
from tests.waiting import eventually


def words(*texts: object) -> tuple[Message, ...]:
    """Small messages."""
    return tuple(Cancel(str(text), 0) for text in texts)


class Inbox:
    """A machine that keeps what it gets and sends what it is told to."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.outbox: dict[str, list[Message]] = defaultdict(list)

    def say(self, peer: str, messages: Iterable[Message]) -> None:
        self.outbox[peer].extend(messages)

    def receive(self, message: Message, now_s: float) -> None:
        self.got.append(message)

    def step(self, now_s: float) -> bool:
        return False

    def take_outbox(self) -> dict[str, list[Message]]:
        outbox, self.outbox = self.outbox, defaultdict(list)
        return outbox


class MemoryChannel:
    """An end of a carrier within this process.

    Attributes:
        sent: Frames on their way to the other end; None is its end.
        is_cut: Nothing that is sent arrives any more, and nobody is told.
    """

    def __init__(self) -> None:
        self.sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_cut = False
        self.is_closed = False
        self.other: MemoryChannel

    async def send(self, frame: bytes) -> None:
        if self.is_closed:
            raise LinkError("sent to a closed channel")
        if not self.is_cut:
            self.sent.put_nowait(frame)

    async def receive(self) -> bytes:
        frame = await self.other.sent.get()
        if frame is None:
            raise LinkError("the peer ended the link")
        return frame

    def close(self) -> None:
        self.is_closed = True
        self.sent.put_nowait(None)


class MemoryTransport:
    """Opens channels to answerers of this process.

    Attributes:
        answerers: By replica id; who is not among them cannot be reached.
        channels: All that were opened, the callers' ends.
    """

    def __init__(self, answerers: dict[str, Answerer]) -> None:
        self.answerers = answerers
        self.channels: list[MemoryChannel] = []

    async def __call__(self, hello: Hello) -> Channel:
        if hello.callee not in self.answerers:
            raise LinkError(f"{hello.callee} is gone")
        mine, theirs = MemoryChannel(), MemoryChannel()
        mine.other, theirs.other = theirs, mine
        self.channels.append(mine)
        spawn(self.answerers[hello.callee].answer(theirs))
        await mine.send(encode(hello))
        return mine


async def ended(link: asyncio.Task[None]) -> BaseException | None:
    await eventually(link.done)
    return link.exception()
