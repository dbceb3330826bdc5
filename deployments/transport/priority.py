"""Who goes first where processes of one machine want the same cores.

A step of the target cannot begin before its machine has had its turn, and all of its sequences wait meanwhile; the text
of a stream may be a moment late. So the machine of a target goes before all others between two steps, where that is
allowed in real time, that of a drafter and a router before what only passes text on, and an ingress gives way to all.
A worker's other threads go early, too: they carry its messages, and while one has the interpreter its machine cannot.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

GOES_FIRST, GOES_EARLY, GIVES_WAY = -10, -5, 5
"""What is added to the niceness with which a process was started."""


def shift_niceness(by: int, *, spared: int | None = None) -> None:
    """Add to the niceness of this process; where the system refuses it, it stays.

    On Linux each thread has its own, and a new one has that of the thread that starts it. Elsewhere nothing happens
    where one is to be spared.

    Args:
        by: What is added.
        spared: The thread that stays as it is, by the system's number.
    """
    if sys.platform == "linux":
        threads = [int(name) for name in os.listdir("/proc/self/task") if int(name) != spared]
    else:
        threads = [0] if spared is None else []
    for thread in threads:
        with suppress(ProcessLookupError, PermissionError):  # it has ended; only some users may go before others
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)


class Precedence:
    """Of the thread that makes it, on Linux and where the system allows it; elsewhere nothing happens.

    Args:
        by: What is added to its niceness while it has precedence.
        at_once: In real time rather, where that is allowed: it has a core as soon as it could go on. A niceness alone
            makes it wait until who has the core has had its slice, some milliseconds.
    """

    def __init__(self, by: int, *, at_once: bool = False) -> None:
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._keeps_a_core = self._goes_first = False
        self._ways: list[Callable[[], None]] = []
        if sys.platform == "linux":
            self._policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
            may_change = self._policy in (os.SCHED_OTHER, os.SCHED_BATCH)
            self._ways = [_go_on_at_once] if at_once and may_change else []
            self._ways += [partial(self._shift, step) for step in dict.fromkeys((by, GOES_EARLY))]

    @contextmanager
    def after_waiting(self) -> Iterator[None]:
        """Around what the thread waits for: then it goes first, until the next time and meanwhile.

        But not meanwhile where it was busy for most of that last time: it computes, or asks its device over and over.
        """
        if self._goes_first and self._keeps_a_core:
            self._as_usual()
        began_s, busy_s = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._keeps_a_core = time.thread_time() - busy_s > (time.monotonic() - began_s) / 2
            self._go_first()

    def _go_first(self) -> None:
        """In the first way that the system allows; what it refuses once is not asked for again."""
        while self._ways:
            with suppress(OSError):  # not this user, or nobody: some systems know no other policy
                self._ways[0]()
                self._goes_first = True
                return
            del self._ways[0]

    def _as_usual(self) -> None:
        if self._ways[0] is _go_on_at_once:
            os.sched_setscheduler(0, self._policy | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        self._shift(0)

    def _shift(self, by: int) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, self._usual + by)


def _go_on_at_once() -> None:
    """At the lowest priority of real time; threads that this one starts are as others."""
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
