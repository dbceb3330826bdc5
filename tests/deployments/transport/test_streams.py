"""The two streams of a link belong together: a router and a worker in one process, calling each other directly."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest

from deployments.transport.host import LoopHost
from deployments.transport.links import spawn
from deployments.transport.streams import Stream, WorkerAnswerer, WorkerDialer
from deployments.transport.wire import Greeting, Hello, LinkError, LinkRefusedError, LinkTimes

TIMES = LinkTimes(open_timeout_s=60.0, heartbeat_s=0.01, silence_s=60.0)


class Inbox:
    """A machine that keeps what it gets and sends what it is told to."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.outbox: dict[str, list[Any]] = defaultdict(list)

    def receive(self, message: Any, now_s: float) -> None:
        self.got.append(message)

    def step(self, now_s: float) -> bool:
        return False

    def take_outbox(self) -> dict[str, list[Any]]:
        outbox, self.outbox = self.outbox, defaultdict(list)
        return outbox


class Call:
    """A streaming call: the callee runs in a task of its own, and is cancelled with the call."""

    def __init__(self, stream: Stream) -> None:
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._task = spawn(self._run(stream))

    async def _run(self, stream: Stream) -> None:
        try:
            async for item in stream:
                self._items.put_nowait(item)
            self._items.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._items.put_nowait(error)
        finally:
            await stream.aclose()

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self._task.cancel()


class Deployment:
    """Stands for a deployment's handle: methods by name, and the streams that are open."""

    def __init__(self, **methods: Callable[[Hello], Stream]) -> None:
        self._methods = methods
        self.calls: dict[str, Call] = {}

    @property
    def handle(self) -> Deployment:
        return self

    def options(self, *, method_name: str, session_id: str, stream: bool) -> Deployment:
        self._method = method_name
        return self

    def remote(self, hello: Hello) -> Call:
        call = self.calls[self._method] = Call(self._methods[self._method](hello))
        return call


class Ends:
    """A router and a worker, the link between them, and how often it was up."""

    def __init__(self) -> None:
        self.router, self.worker = LoopHost(Inbox(), tick_s=60.0), LoopHost(Inbox(), tick_s=60.0)
        self.routers = Deployment(feed=lambda hello: self.feed(hello))
        self.workers = Deployment(results=lambda hello: self.results(hello))
        self.dialer = WorkerDialer("r", self.router, self.workers, TIMES)
        answerer = WorkerAnswerer("w", self.worker, self.routers, TIMES)
        self.feed: Callable[[Hello], Stream] = self.dialer.feed
        self.results: Callable[[Hello], Stream] = answerer.results
        self.ups = 0

    def dial(self) -> asyncio.Task[None]:
        def up() -> None:
            self.ups += 1

        return spawn(self.dialer.dial("w", up))

    async def linked(self) -> asyncio.Task[None]:
        link = self.dial()
        await until(lambda: self.ups > 0 or link.done())
        assert self.ups == 1
        return link


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    ends.router.start()
    ends.worker.start()
    yield ends
    ends.router.stop()
    ends.worker.stop()
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def ended(link: asyncio.Task[None]) -> BaseException | None:
    await until(link.done)
    return link.exception()


async def test_a_link_is_up_when_both_streams_are_and_carries_both_ways(ends: Ends) -> None:
    link = await ends.linked()
    ends.router.tell(lambda m, _now_s: m.outbox["w"].append("down"))
    ends.worker.tell(lambda m, _now_s: m.outbox["r"].append("up"))
    await until(lambda: ends.worker._machine.got == ["down"] and ends.router._machine.got == ["up"])
    assert not link.done()
    link.cancel()


@pytest.mark.parametrize("which", ["results", "feed"])
async def test_the_end_of_either_stream_ends_the_link_on_both_sides(ends: Ends, which: str) -> None:
    link = await ends.linked()
    calls = {**ends.workers.calls, **ends.routers.calls}
    calls[which]._items.put_nowait(ConnectionError("cut"))
    assert isinstance(await ended(link), LinkError)
    await until(lambda: all(call._task.done() for call in calls.values()))
    ends.router.tell(lambda m, _now_s: m.outbox["w"].append("late"))
    ends.worker.tell(lambda m, _now_s: m.outbox["r"].append("late"))
    await until(lambda: ends.router.num_dropped_messages == ends.worker.num_dropped_messages == 1)


@pytest.mark.parametrize("which", ["results", "feed"])
async def test_a_stream_whose_reader_is_gone_ends_the_link_though_its_reader_hears_nothing(
    ends: Ends, which: str
) -> None:
    link = await ends.linked()
    calls = {**ends.workers.calls, **ends.routers.calls}
    calls[which]._task.cancel()
    assert isinstance(await ended(link), LinkError)
    await until(lambda: all(call._task.done() for call in calls.values()))


async def test_a_cut_link_leaves_nothing_behind(ends: Ends) -> None:
    link = await ends.linked()
    calls = {**ends.workers.calls, **ends.routers.calls}
    link.cancel()
    await until(lambda: link.done() and all(call._task.done() for call in calls.values()))


async def test_a_link_whose_feed_is_refused_never_comes_up(ends: Ends) -> None:
    async def refuse(hello: Hello) -> AsyncGenerator[Greeting, None]:
        yield Greeting("r", "not now")

    ends.feed = refuse
    assert isinstance(await ended(ends.dial()), LinkError)
    assert ends.ups == 0


@pytest.mark.parametrize(("replica", "refusal"), [("w", "not now"), ("another", None)])
async def test_a_greeting_that_refuses_or_is_of_another_replica_ends_the_link(
    ends: Ends, replica: str, refusal: str | None
) -> None:
    async def greet(hello: Hello) -> AsyncGenerator[Greeting, None]:
        yield Greeting(replica, refusal)
        await asyncio.sleep(60)

    ends.results = greet
    assert isinstance(await ended(ends.dial()), LinkRefusedError)


async def test_a_worker_that_says_nothing_is_given_up(ends: Ends) -> None:
    async def hang(hello: Hello) -> AsyncGenerator[Greeting, None]:
        await asyncio.sleep(60)
        yield Greeting("w")

    ends.results = hang
    ends.dialer._times = LinkTimes(open_timeout_s=0.05)
    error = await ended(ends.dial())
    assert isinstance(error, LinkError)
    assert "silent" in str(error)


async def test_a_feed_is_expected_once_and_only_while_its_link_is_open(ends: Ends) -> None:
    seen: list[Hello] = []
    results = ends.results

    def noting(hello: Hello) -> Stream:
        seen.append(hello)
        assert ends.dialer.expects(hello)
        return results(hello)

    ends.results = noting
    link = await ends.linked()
    assert not ends.dialer.expects(seen[0]), "it is read already"
    link.cancel()
    await until(link.done)
    assert not ends.dialer.expects(seen[0])
