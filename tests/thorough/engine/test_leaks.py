"""Thousands of short sequences, many of which are cancelled: what is held for one is gone with it."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from specdec.core.params import SamplingParams
from specdec.drafting.ngram import NgramOptions
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from tests.sizes import sized
from tests.specdec.engine.pairs import Case, backend, make_draft, start
from tests.specdec.models.families import VOCAB_SIZE, make_model

NUM_OPEN, NEVER = 32, 1000
CONTAINERS = (dict, list, set, frozenset, deque, bytearray)


def held(root: object) -> dict[str, int]:
    """How much is in each container that can be reached from an object over objects of this package, by its path."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def parts(one: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(one, dict):
            yield from ((".values", value) for value in one.values())
        elif isinstance(one, (list, tuple, set, deque)):
            yield from ((".items", value) for value in one)
        elif type(one).__module__.startswith("specdec."):
            slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
            for name in (*getattr(one, "__dict__", ()), *slots):
                yield f".{name}", getattr(one, name, None)

    def walk(path: str, one: Any) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        if isinstance(one, CONTAINERS):
            found[path] = found.get(path, 0) + len(one)
        for name, part in parts(one):
            walk(path + name, part)

    walk("", root)
    return found


def play(service: InProcessService, rng: random.Random, num_sequences: int) -> int:
    """Run them to their ends, some at once; gives how many were cancelled, one of four, wherever they were."""
    open_now: dict[str, int] = {}
    num_begun = num_cancelled = 0
    while num_begun < num_sequences or open_now:
        while num_begun < num_sequences and len(open_now) < NUM_OPEN:
            prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 3, 9))))
            sampling = SamplingParams(rng.choice((0.0, 1.0)), frequency_penalty=rng.choice((0.0, 0.5)))
            (name,) = start(service, [Case(prompt, rng.randint(1, 5), sampling, seed=num_begun)])
            open_now[name] = rng.choice((0, 1, 2, *(NEVER,) * 9))
            num_begun += 1
        for delivery in service.pump():
            if delivery.finish is not None:
                del open_now[delivery.seq]
        for name in [name for name, left in open_now.items() if left == 0]:
            service.cancel(name)
            num_cancelled += 1
            del open_now[name]
        open_now = {name: left - 1 for name, left in open_now.items()}
    return num_cancelled


@pytest.mark.timeout(sized(300, 3600))
def test_sequences_that_have_ended_leave_nothing() -> None:
    now_s = [0.0]
    target = backend(ModelTarget, make_model("llama"), num_blocks=100)
    drafter = backend(ModelDrafter, make_draft("llama", 0.5), num_blocks=100)
    service = InProcessService(target, drafter, 2, clock=lambda: now_s[0], ngram=NgramOptions(2))
    rng = random.Random(1)

    def measured() -> tuple[dict[str, int], list[int]]:
        gc.collect()
        own = psutil.Process()
        return held(service), [len(gc.get_objects()), own.num_fds(), own.num_threads()]

    play(service, rng, 4 * NUM_OPEN)
    before, process_before = measured()
    num_sequences = sized(400, 20_000)
    num_cancelled = play(service, rng, num_sequences)
    assert num_cancelled > num_sequences / 8
    now_s[0] = 1e9  # so long are the ended ones remembered
    service.pump()
    after, process_after = measured()
    assert len(before) > 50, "the walk found the containers"
    grown = {path: (before.get(path, 0), num) for path, num in after.items() if num > before.get(path, 0) + NUM_OPEN}
    assert {path for path in grown if "._noise." not in path} == set(), grown
    for worker in (target, drafter):
        figures = worker.metrics()
        assert figures["num_cached_sequences"] == figures["kv_blocks_in_use"] == 0
    objects, fds, threads = (new - old for old, new in zip(process_before, process_after, strict=True))
    assert objects < num_sequences / 2
    assert (fds, threads) == (0, 0)
