"""What every runtime's process does: load, say that it is ready, then take steps line by line.

It imports nothing outside the standard library, so that any runtime's Python runs it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple


class Given(NamedTuple):
    """What a runtime's process is told, in this order on its command line."""

    model: str
    threads: int
    context: int

    @staticmethod
    def read() -> Given:
        """From the command line."""
        model, threads, context = sys.argv[1:4]
        return Given(model, int(threads), int(context))


def take_steps(settings: str, step: Callable[[int], float | None]) -> None:
    """Take as many steps as each line of the input says, until it ends.

    Answers with milliseconds of a step by the clock and of CPU time, which other work on the machine changes less.

    Args:
        settings: What the runtime runs, in words.
        step: Takes so many steps. Gives the seconds by the clock that were theirs alone; None where all of it was.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    step(2)
    answers.write(json.dumps({"settings": settings}) + "\n")
    answers.flush()
    for line in sys.stdin:
        count, before = int(line), resource.getrusage(resource.RUSAGE_SELF)
        started_s = time.perf_counter()
        own_s = step(count)
        wall_s = time.perf_counter() - started_s if own_s is None else own_s
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        answers.write(json.dumps({"wall_ms": 1e3 * wall_s / count, "cpu_ms": 1e3 * cpu_s / count}) + "\n")
        answers.flush()
