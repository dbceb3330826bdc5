"""Mailboxes: what is put at once is read at once, from whatever thread it comes."""

from __future__ import annotations

import asyncio
import threading

from deployments.transport.host import Mailbox


async def test_everything_pending_is_one_batch() -> None:
    box = Mailbox()
    for i in range(1000):
        assert box.put([i])
    batches = box.batches(heartbeat_s=60.0)
    assert await anext(batches) == tuple(range(1000))
    await batches.aclose()


async def test_messages_of_many_threads_arrive_once_and_in_the_order_of_each() -> None:
    box = Mailbox()

    def put(thread: int) -> None:
        for i in range(500):
            box.put([(thread, i)])

    threads = [threading.Thread(target=put, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    got: list[tuple[int, int]] = []
    async for batch in box.batches(heartbeat_s=60.0):
        got.extend(batch)
        if len(got) == 2000:
            break
    for thread in range(4):
        assert [i for t, i in got if t == thread] == list(range(500))


async def test_an_idle_box_gives_heartbeats() -> None:
    box = Mailbox()
    batches = box.batches(heartbeat_s=0.01)
    assert [await anext(batches), await anext(batches)] == [(), ()]
    box.put("a")
    assert await anext(batches) == ("a",)
    await batches.aclose()


async def test_closing_ends_the_reader_after_what_is_pending() -> None:
    box = Mailbox()
    box.put("ab")
    box.close()
    box.close()
    assert not box.put("c")
    assert [batch async for batch in box.batches(heartbeat_s=60.0)] == [("a", "b")]


async def test_closing_from_another_thread_wakes_the_reader() -> None:
    box = Mailbox()
    reader = asyncio.create_task(_all(box))
    await asyncio.sleep(0)
    await asyncio.to_thread(box.close)
    assert await reader == []


def test_a_put_after_the_loop_is_gone_is_no_error() -> None:
    async def make() -> Mailbox:
        return Mailbox()

    box = asyncio.run(make())
    box.put("a")
    box.close()
    assert box.closed


async def _all(box: Mailbox) -> list[tuple[object, ...]]:
    return [batch async for batch in box.batches(heartbeat_s=60.0)]
