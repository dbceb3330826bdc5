"""Thousands of random schedules over the real machines, without a broken promise."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable

import pytest

from specdec.protocol.target import TargetMachine
from tests.specdec.protocol.world import NOTHING, Result, World, run_schedule

PART = 500


def run_all(seeds: Iterable[int]) -> list[Result]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(run_schedule, seeds, chunksize=25)


def check(first: int, count: int) -> None:
    """A failure names seeds: ``World(seed).run()`` repeats one, step by step the same."""
    results = run_all(range(first, first + count))
    broken = [(result.seed, result.violation) for result in results if result.violation is not None]
    assert broken == []
    counts = sum((result.counts for result in results), Counter())
    assert counts["finished"] > 2 * count
    assert min(counts[what] for what in ("restarts", "lapses", "rumours", "stalls")) > count / 2
    assert counts["cancelled"] > count / 20


@pytest.mark.parametrize("part", range(4))
def test_random_schedules(part: int) -> None:
    check(part * PART, PART)


@pytest.mark.parametrize("seed", range(20))
def test_notes_add_up_to_the_targets_counters(seed: int) -> None:
    """Where nothing fails and every sequence is opened once, notes and counters tell the same of every round."""
    world = World(seed)
    world.adversary, world.net.loss, world.net.delay = NOTHING, 0.0, 0.0
    world.run()
    clients = world.watch.clients.values()
    targets = [node.machine for node in world.nodes.values() if isinstance(node.machine, TargetMachine)]
    told = (
        sum(len(client.tokens) for client in clients),
        sum(client.notes.how.count("a") for client in clients),
        sum(sum(client.notes.num_drafted) for client in clients),
        sum(count > 0 for client in clients for count in client.notes.num_drafted),
    )
    counters = [target.counters for target in targets]
    assert told == (
        sum(c.num_committed_tokens for c in counters),
        sum(c.num_accepted_tokens for c in counters),
        sum(c.num_draft_tokens for c in counters),
        sum(c.num_drafts for c in counters),
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(40))
def test_random_schedules_long(part: int) -> None:
    check(10_000 + part * PART, PART)
