"""Minutes of requests of all kinds, a third of whose clients go away: no process grows."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest

from tests.integration.mixed import mixed_requests
from tests.integration.running import RunningService, eventually, nothing_held

logger = logging.getLogger(__name__)
WARM_UP_S, LOAD_S = 60.0, 300.0
MOST_RSS_GROWTH = 48 << 20
"""Bytes of one process, after its warm-up: allocators keep pages, and caches fill."""
MOST_FURTHER = 4
"""Descriptors or threads of one process: thread pools and connections grow to their size when they are needed."""


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    name: str
    rss: int
    fds: int
    threads: int


def processes(service: RunningService) -> dict[int, Held]:
    """Every process of the service that does any work for it."""
    found = {}
    for child in service.children():
        with child.oneshot():
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and ("ray::" in command or "cluster.cli" in command):
                found[child.pid] = Held(command[:60], child.memory_info().rss, child.num_fds(), child.num_threads())
    return found


def load(service: RunningService, for_s: float, seed: int) -> int:
    """Eight clients, one request after the other; gives how many were sent."""
    end_s, model, sent = time.monotonic() + for_s, service.model, itertools.count()
    requests = itertools.cycle(mixed_requests(300, seed))

    def client() -> None:
        while time.monotonic() < end_s:
            next(requests).send(service.url, model)
            next(sent)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(client) for _ in range(8)]:
            future.result()
    eventually(lambda: nothing_held(service), 60, "no sequence and no block is held")
    return next(sent)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """Its caches are full after the warm-up: memory that is touched for the first time is no leak."""
    caches = ("--target-kv-cache-memory", "64MiB", "--draft-kv-cache-memory", "16MiB", "--max-model-len", "512")
    running = RunningService("--num-speculative-tokens", "4", *caches)
    yield running
    assert running.stop() == 0


@pytest.mark.timeout(900)
def test_no_process_grows_under_load(service: RunningService) -> None:
    load(service, WARM_UP_S, seed=1)
    before = processes(service)
    num_requests = load(service, LOAD_S, seed=2)
    after = processes(service)
    for pid, held in after.items():
        grown = {name: getattr(held, name) - getattr(before[pid], name) for name in ("rss", "fds", "threads")}
        logger.warning("%s: %d requests: %s", held.name, num_requests, grown)
    assert before.keys() == after.keys(), "none died"
    assert any("TargetServer" in held.name for held in after.values())
    for pid, held in after.items():
        assert held.rss - before[pid].rss < MOST_RSS_GROWTH, held
        assert held.fds - before[pid].fds <= MOST_FURTHER, held
        assert held.threads - before[pid].threads <= MOST_FURTHER, held
