"""Threads whose work is taken in turn from everybody who has some."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")


class FairThreads:
    """A few threads with one queue per key. For any thread.

    A thread that is free takes the oldest work of the key whose turn it is (round robin). One key never has all
    threads: while its work runs for seconds, that of another key begins at once.

    Args:
        num_threads: At least 2.
        name: Of the threads.
        stack_bytes: Stack of each; 0 is the system's default.
    """

    def __init__(self, num_threads: int, name: str, stack_bytes: int = 0) -> None:
        self._most_of_one_key = num_threads - 1
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[Future[Any]]] = OrderedDict()
        self._work: dict[Future[Any], Callable[[], Any]] = {}
        self._num_running: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(num_threads, name)
        if stack_bytes:
            self._begin_all(num_threads, stack_bytes)

    def submit(self, key: str, work: Callable[[], _T]) -> Future[_T]:
        """Have work done in its key's turn. Cancelling the future takes it back, unless it has begun."""
        future: Future[_T] = Future()
        with self._lock:
            self._work[future] = work
            self._queues.setdefault(key, deque()).append(future)
        future.add_done_callback(self._forget)
        self._threads.submit(self._run)
        return future

    def also_for(self, key: str, future: Future[Any]) -> None:
        """Another key wants what was submitted: it is done in the turn of whichever comes first."""
        with self._lock:
            if future not in self._work or future in self._queues.get(key, ()):
                return
            self._queues.setdefault(key, deque()).append(future)
        self._threads.submit(self._run)

    def _forget(self, future: Future[Any]) -> None:
        """Let go of work that was taken back; its places in the queues are passed over."""
        with self._lock:
            self._work.pop(future, None)

    def _run(self) -> None:
        """Do what may begin now. Whoever ends some work looks for more: what waited for that can begin then."""
        while (taken := self._take()) is not None:
            key, future, work = taken
            try:
                if future.set_running_or_notify_cancel():
                    _do(future, work)
            finally:
                with self._lock:
                    self._num_running[key] -= 1
                    if not self._num_running[key]:
                        del self._num_running[key]

    def _take(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            for key in list(self._queues):
                if self._num_running[key] >= self._most_of_one_key:
                    continue
                queue = self._queues.pop(key)
                while queue:
                    future = queue.popleft()
                    work = self._work.pop(future, None)
                    if work is None:
                        continue
                    if queue:
                        self._queues[key] = queue  # behind all others
                    self._num_running[key] += 1
                    return key, future, work
            return None

    def _begin_all(self, num_threads: int, stack_bytes: int) -> None:
        before, together = threading.stack_size(stack_bytes), threading.Barrier(num_threads)
        try:
            for begun in [self._threads.submit(together.wait) for _ in range(num_threads)]:
                begun.result()
        finally:
            threading.stack_size(before)


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # as in an executor's threads: it goes to whoever waits
        future.set_exception(error)
    else:
        future.set_result(result)
