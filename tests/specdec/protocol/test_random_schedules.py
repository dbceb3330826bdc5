"""Thousands of random schedules over the real machines, without a broken promise."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.specdec.protocol.world import Result, run_schedule

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


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(40))
def test_random_schedules_long(part: int) -> None:
    check(10_000 + part * PART, PART)
