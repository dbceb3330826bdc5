"""The carrier over Serve's streams, with the callee's methods called directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.transport.discovery import process_board
from deployments.transport.link import Channel, spawn
from deployments.transport.streams import StreamAnswerer, dial_stream
from deployments.transport.wire import WIRE_VERSION, Hello, LinkError, encode
from tests.waiting import eventually

HELLO = Hello("w", "r", "Target", wire=WIRE_VERSION)


class Call:
    """A streaming call: the callee runs in a task of its own, and is cancelled with the call."""

    def __init__(self, stream: Any) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.task = spawn(self._run(stream))

    async def _run(self, stream: Any) -> None:
        try:
            async for item in stream:
                self.items.put_nowait(item)
            self.items.put_nowait(StopAsyncIteration())
        finally:
            await stream.aclose()

    async def __anext__(self) -> Any:
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.task.cancel()


class Ends:
    """A callee's methods behind a handle, and the channels that it takes."""

    def __init__(self) -> None:
        self.taken: list[Channel] = []
        self.dialled: list[Channel] = []
        self.calls: list[Call] = []
        self.answerer = StreamAnswerer(self._answer)
        self._done = asyncio.Event()

    async def _answer(self, channel: Channel) -> None:
        self.taken.append(channel)
        try:
            await self._done.wait()
        finally:
            channel.close()

    def pinned(self, method: str, replica: str, *, stream: bool) -> Ends | Poster:
        assert (method, stream) in {("link", True), ("post", False)}
        return self if stream else Poster(self.answerer)

    def remote(self, first: bytes) -> Call:
        self.calls.append(Call(self.answerer.link(first)))
        return self.calls[-1]

    async def linked(self) -> tuple[Channel, Channel]:
        mine = await dial_stream(self, HELLO)
        self.dialled.append(mine)
        await eventually(lambda: bool(self.taken))
        assert await self.taken[-1].receive() == encode(HELLO)
        return mine, self.taken[-1]


class Poster:
    """The handle of ``post``."""

    def __init__(self, answerer: StreamAnswerer) -> None:
        self._answerer = answerer

    async def remote(self, data: bytes) -> bytes:
        await asyncio.sleep(0)
        return self._answerer.post(data)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    yield ends
    for mine in ends.dialled:
        mine.close()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)


async def test_frames_travel_both_ways(ends: Ends) -> None:
    mine, theirs = await ends.linked()
    for number in range(10):
        await mine.send(b"%d" % number)
        await theirs.send(b"%d" % -number)
    assert [await theirs.receive() for _ in range(10)] == [b"%d" % number for number in range(10)]
    assert [await mine.receive() for _ in range(10)] == [b"%d" % -number for number in range(10)]


async def test_two_links_are_kept_apart(ends: Ends) -> None:
    first, _ = await ends.linked()
    ends.taken.clear()
    second, theirs = await ends.linked()
    await first.send(b"1")
    await second.send(b"2")
    assert await theirs.receive() == b"2"


async def test_the_callees_end_ends_the_link(ends: Ends) -> None:
    mine, _ = await ends.linked()
    ends._done.set()
    with pytest.raises(LinkError, match="ended"):
        await mine.receive()
    with pytest.raises(LinkError, match="no such link"):
        await mine.send(b"late")


async def test_a_callee_that_leaves_ends_all_links_and_each_holds_it_until_then(ends: Ends) -> None:
    first, _ = await ends.linked()
    ends.taken.clear()
    second, _ = await ends.linked()
    assert "r" in process_board().held()
    ends.answerer.close()
    for mine in (first, second):
        with pytest.raises(LinkError, match="ended"):
            await mine.receive()
        assert "r" in process_board().held()
        mine.close()
    assert "r" not in process_board().held()


async def test_the_callers_end_ends_the_link(ends: Ends) -> None:
    mine, _ = await ends.linked()
    mine.close()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)
    with pytest.raises(LinkError, match="no such link"):
        await mine.send(b"late")


async def test_a_failed_stream_ends_the_link(ends: Ends) -> None:
    mine, _ = await ends.linked()
    ends.calls[0].items.put_nowait(ConnectionError("cut"))
    with pytest.raises(LinkError, match="cut"):
        await mine.receive()


async def test_the_next_frame_waits_until_serve_has_taken_the_last(ends: Ends) -> None:
    """Meanwhile messages gather in the mailbox, and go as one batch."""
    channel = None

    async def answer(taken: Channel) -> None:
        nonlocal channel
        channel = taken
        await taken.send(b"1")
        sent.append(1)
        await asyncio.sleep(60)

    sent: list[int] = []
    stream = StreamAnswerer(answer).link(bytes(16) + encode(HELLO))
    assert await anext(stream) == b"1"
    await asyncio.sleep(0.02)
    assert not sent
    reader = asyncio.ensure_future(anext(stream))
    await eventually(lambda: sent == [1])
    reader.cancel()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)
