"""Work of several keys over a few threads: who is next, and who is never next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from specdec.core.fair_threads import FairThreads

WAIT_S = 30


class Held:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.may_end.set()


def in_order(done: list[str]) -> Callable[[str], Callable[[], None]]:
    return lambda name: lambda: done.append(name)


def ended(futures: list[Future[Any]]) -> None:
    for future in futures:
        future.result(WAIT_S)


def test_keys_take_turns_and_each_has_its_oldest_done_first(held: Held) -> None:
    threads, done = FairThreads(2, "test"), []
    first = threads.submit("x", held)
    work = in_order(done)
    holds_a = Held()
    other = threads.submit("a", holds_a)
    assert holds_a.begun.wait(WAIT_S)
    futures = [threads.submit("a", work(f"a{i}")) for i in range(3)]
    futures += [threads.submit(key, work(f"{key}{i}")) for key in "bc" for i in range(2)]
    holds_a.may_end.set()
    ended([other, *futures])
    assert done == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"]
    held.may_end.set()
    ended([first])


def test_one_key_never_has_all_threads(held: Held) -> None:
    threads = FairThreads(3, "test")
    many = [Held() for _ in range(4)]
    futures = [threads.submit("a", work) for work in many]
    assert all(work.begun.wait(WAIT_S) for work in many[:2])
    assert threads.submit("b", lambda: 7).result(WAIT_S) == 7
    assert not many[2].begun.is_set()
    many[0].may_end.set()
    assert many[2].begun.wait(WAIT_S), "whoever ends begins the next"
    for work in many:
        work.may_end.set()
    ended(futures)


def test_what_is_taken_back_is_not_begun_and_costs_no_turn(held: Held) -> None:
    threads, done = FairThreads(2, "test"), []
    work = in_order(done)
    futures = [threads.submit("a", held)]
    assert held.begun.wait(WAIT_S)
    back, kept = threads.submit("a", work("back")), threads.submit("a", work("kept"))
    assert back.cancel()
    held.may_end.set()
    ended([*futures, kept])
    assert done == ["kept"]
    with pytest.raises(CancelledError):
        back.result()
    assert not threads._work
    assert not threads._queues
    assert not threads._num_running


def test_another_key_that_wants_the_same_has_it_in_its_own_turn(held: Held) -> None:
    threads, done = FairThreads(2, "test"), []
    work = in_order(done)
    futures = [threads.submit("a", held), *(threads.submit("a", work(f"a{i}")) for i in range(3))]
    assert held.begun.wait(WAIT_S)
    threads.also_for("b", futures[-1])
    futures[-1].result(WAIT_S)
    assert done == ["a2"], "it did not wait for the other key's"
    threads.also_for("b", futures[-1])  # it is done: nothing is left to do
    held.may_end.set()
    ended(futures)
    assert done == ["a2", "a0", "a1"]


def test_what_work_raises_is_told_to_whoever_waits() -> None:
    threads = FairThreads(2, "test")

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        threads.submit("a", fail).result(WAIT_S)
    assert threads.submit("a", lambda: threading.current_thread().name[:4]).result(WAIT_S) == "test"
