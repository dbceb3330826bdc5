"""Works that are timed by turns, so that what else the machine does falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def by_turns(works: Sequence[Callable[[], Result]], num_rounds: int) -> list[list[tuple[float, Result]]]:
    """What each work took, in seconds, and gave, by round; one round more, before these, warms up."""

    def timed(work: Callable[[], Result]) -> tuple[float, Result]:
        started_s = time.perf_counter()
        result = work()
        return time.perf_counter() - started_s, result

    return [[timed(work) for work in works] for _ in range(num_rounds + 1)][1:]


def spread(ratios: Sequence[float]) -> str:
    """Least, median and most."""
    return f"{min(ratios):.2f}, {statistics.median(ratios):.2f}, {max(ratios):.2f}"
