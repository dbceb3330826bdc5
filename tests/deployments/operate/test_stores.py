"""The store's contract, and the actor that holds it."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.app import AppArgs
from cluster.config.base import validated
from cluster.config.limits import ResponsesStore
from deployments.http import store as store_module
from deployments.http.store import NOTHING, Changes, MemoryStore, Store
from deployments.operate import stores as stores_module
from deployments.operate.stores import RayStore, open_store
from specdec.core.errors import ServiceUnavailableError

MakeStore = Callable[..., Store]


@pytest.fixture
def make() -> MakeStore:
    """Makes an empty store with bounds."""
    return lambda **bounds: MemoryStore(ResponsesStore(**bounds))


async def there(store: Store, owner: str, names: Any) -> list[str]:
    return [name for name in names if await store.get(owner, str(name)) is not None]


def record(size: int) -> bytes:
    return b"x" * size


async def test_a_record_is_its_owners_until_it_is_deleted(make: MakeStore) -> None:
    store = make()
    assert await store.put("alice", "a", b"\x00\xff\n")
    assert await store.get("alice", "a") == b"\x00\xff\n"
    assert await store.get("bob", "a") is None
    assert not await store.delete("bob", "a")
    assert await store.put("alice", "a", b"other")
    assert await store.get("alice", "a") == b"other"
    assert await store.delete("alice", "a")
    assert not await store.delete("alice", "a")
    assert await store.get("alice", "a") is None


async def test_the_oldest_go_where_there_are_too_many_or_they_are_too_large(make: MakeStore) -> None:
    store = make(max_responses=3, max_bytes=1024)
    for name in "abcd":
        assert await store.put("o", name, record(100))
    assert await there(store, "o", "abcd") == ["b", "c", "d"]
    assert await store.put("o", "e", record(850))
    assert await there(store, "o", "bcde") == ["d", "e"]
    assert not await store.put("o", "f", record(1025))
    assert await there(store, "o", "de") == ["d", "e"]
    assert await store.put("o", "d", record(10)), "written again, it is the newest, and its old size is forgotten"
    assert await store.put("o", "g", record(160))
    assert await there(store, "o", "deg") == ["d", "e", "g"]
    assert await store.put("o", "h", record(4))
    assert await there(store, "o", "degh") == ["d", "g", "h"]


async def test_no_owner_pushes_out_another_by_keeping_many(make: MakeStore) -> None:
    store = make(max_responses=100, max_bytes=1024)
    assert await store.put("alice", "a", record(200))
    for number in range(30):
        assert await store.put("bob", str(number), record(100))
    assert await there(store, "alice", "a") == ["a"]
    assert await there(store, "bob", range(30)) == [*range(22, 30)]
    assert await store.put("carol", "c", record(1000))
    assert await there(store, "carol", "c") == ["c"], "the newest stays, though its owner has most"
    assert await there(store, "bob", range(30)) == await there(store, "alice", "a") == []


async def test_a_record_goes_when_it_is_too_old(make: MakeStore) -> None:
    store = make(max_age_s=0.2)
    assert await store.put("o", "a", b"x")
    async with asyncio.timeout(10):
        while await store.get("o", "a") is not None:
            await asyncio.sleep(0.02)
    assert not await store.delete("o", "a")


async def test_names_are_read_whole_and_then_by_their_changes(make: MakeStore) -> None:
    store = make()
    empty = await store.changes(NOTHING, 0.0)
    assert (empty.is_all, empty.values) == (True, {})
    assert not await store.assign("a", b"1")
    assert not await store.assign("b", b"2")
    assert await store.assign("a", b"3")
    first = await store.changes(empty.version, 0.0)
    assert (first.is_all, first.values) == (False, {"a": b"3", "b": b"2"})
    assert await store.assign("a", None)
    assert not await store.assign("never", None)
    later = await store.changes(first.version, 0.0)
    assert (later.is_all, later.values) == (False, {"a": None, "never": None})
    assert (await store.changes(later.version, 0.0)).values == {}
    everything = await store.changes(NOTHING, 0.0)
    assert (everything.is_all, everything.values["b"], everything.version) == (True, b"2", later.version)
    assert everything.values.get("a") is None


async def test_whoever_watches_is_told_at_the_change(make: MakeStore) -> None:
    store = make()
    start = await store.changes(NOTHING, 0.0)
    watch = asyncio.create_task(store.changes(start.version, 60.0))
    await asyncio.sleep(0.05)
    assert not watch.done()
    await store.assign("a", b"1")
    async with asyncio.timeout(10):
        found: Changes = await watch
    assert found.values == {"a": b"1"}
    assert (await store.changes(found.version, 0.01)).values == {}


async def test_names_that_are_gone_are_not_remembered_for_ever(make: MakeStore) -> None:
    """Whoever read before that reads all again."""
    store = make()
    await store.assign("stays", b"1")
    early = await store.changes(NOTHING, 0.0)
    for number in range(1030):
        await store.assign(str(number), None)
    found = await store.changes(early.version, 0.0)
    assert found.is_all
    assert found.values["stays"] == b"1"
    assert len(found.values) < 1030


async def test_a_store_that_lost_everything_says_so_by_its_id() -> None:
    lost = MemoryStore(ResponsesStore())
    await lost.assign("a", b"1")
    version = (await lost.changes(NOTHING, 0.0)).version
    found = await MemoryStore(ResponsesStore()).changes(version, 60.0)
    assert (found.is_all, found.values) == (True, {})


async def test_an_eviction_looks_at_no_other_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, as the number of records and owners grows tenfold."""
    looked_at: list[Any] = []

    def counted(heap: list[Any]) -> Any:
        looked_at.append(heap[0])
        return heapq.heappop(heap)

    monkeypatch.setattr(store_module, "heappop", counted)
    counts = []
    for count in (1_000, 10_000):
        store = MemoryStore(ResponsesStore(max_responses=count))
        for number in range(count):
            await store.put(f"o{number % (count // 10)}", str(number), b"x")
        looked_at.clear()
        for number in range(100):
            await store.put("new", str(number), b"x")
        assert len(store) == count
        counts.append(len(looked_at))
    assert counts[1] < 2 * counts[0]


WATCHED = Changes(("id", 1), True, {"n": b"1"})


class SlowActor(RayStore):
    """An actor that starts when it may, and answers ``answers_s`` after it was asked, from another thread."""

    def __init__(self) -> None:
        super().__init__("", ResponsesStore())
        self.answers_s, self.num_starts, self.may_start = 0.0, 0, asyncio.Event()

    async def _start(self) -> Any:
        self.num_starts += 1
        await self.may_start.wait()
        return self

    async def _ask(self, method: str, args: tuple[Any, ...]) -> Any:
        await asyncio.to_thread(time.sleep, self.answers_s)
        for _ in range(3):  # as Ray's answers take turns of the loop
            await asyncio.sleep(0)
        return WATCHED if method == "changes" else b"x"


async def test_an_answer_counts_though_the_loop_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "PATIENCE_S", 0.1)
    store = SlowActor()
    store.may_start.set()
    assert await store.get("o", "a") == b"x"
    store.answers_s = 0.02
    asyncio.get_running_loop().call_later(0.01, time.sleep, 0.2)
    assert await store.get("o", "a") == b"x"
    store.answers_s = 0.3
    for says in ("did not answer within 0.1 s", "owes an earlier answer"):
        with pytest.raises(ServiceUnavailableError, match=says):
            await store.get("o", "a")


async def test_requests_do_not_wait_for_a_slow_start_as_whoever_watches_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them wait for one start, which goes on without them."""
    monkeypatch.setattr(stores_module, "PATIENCE_S", 0.02)
    store = SlowActor()
    watch = asyncio.create_task(store.changes(NOTHING, 10.0))
    await asyncio.sleep(0)
    asked = [store.put("o", "a", b"x"), store.get("o", "a"), store.changes(NOTHING, 0.0)]
    failures = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(one) for one in failures] == ["the store of responses and adapters did not answer within 0.02 s"] * 3
    with pytest.raises(ServiceUnavailableError, match="owes an earlier answer"):
        await store.assign("n", b"x")
    assert (watch.done(), store.num_starts) == (False, 1)
    store.may_start.set()
    assert await watch == WATCHED
    assert await store.get("o", "a") == b"x"
    assert store.num_starts == 1


def versions(**keys: Any) -> list[AppArgs]:
    """An application before and after an update that replaces every replica."""
    changes: tuple[dict[str, Any], ...] = ({}, {"block_size": 32, "served_model_name": "other"})
    return [validated(AppArgs, keys | change) for change in changes]


async def test_one_actor_on_the_head_outlives_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    async def set_bounds(_: ResponsesStore) -> None: ...

    def remote_options(**given: Any) -> Any:
        asked.append(given)
        actor = SimpleNamespace(set_bounds=SimpleNamespace(remote=set_bounds))
        return SimpleNamespace(remote=lambda _: actor)

    monkeypatch.setattr(stores_module.ray, "remote", lambda _: SimpleNamespace(options=remote_options))
    head = "ab" * 28
    alive = [("cd" * 28, {"CPU": 4.0}), (head, {"node:__internal_head__": 1.0})]
    nodes = [{"NodeID": name, "Alive": True, "Resources": resources} for name, resources in alive]
    monkeypatch.setattr(stores_module.ray, "nodes", lambda: nodes)
    for args in versions(actors={"ingress": {"label_selector": {"pool": "front"}}}):
        await open_store(args, "specdec")._start()
    before, after = asked
    for options in asked:
        strategy = options.pop("scheduling_strategy")
        assert (strategy.node_id, strategy.soft) == (head, True), "a drain of a worker node does not take it"
    assert before == after
    assert (before["name"], before["namespace"], before["get_if_exists"]) == ("store:specdec", "specdec", True)
    assert (before["lifetime"], before["max_restarts"]) == ("detached", -1), "a node that goes costs what it held"
    assert before["num_cpus"] == 0
