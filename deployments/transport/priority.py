"""Who goes first where processes of one machine want the same cores.

A step of the target cannot begin before its machine has had its turn, and all of its sequences wait meanwhile; the text
of a stream may be a moment late. So the machine of a target goes before all others between two steps, that of a drafter
and a router before what only passes text on, and an ingress gives way to all.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

GOES_FIRST, GOES_EARLY, GIVES_WAY = -10, -5, 5
"""What is added to the niceness with which a process was started."""


def shift_niceness(by: int) -> None:
    """Add to the niceness of this process; where the system does not allow a lower one, it stays.

    On Linux each thread has its own, and a new one has that of the thread that starts it.
    """
    threads = [int(name) for name in os.listdir("/proc/self/task")] if sys.platform == "linux" else [0]
    for thread in threads:
        with suppress(ProcessLookupError, PermissionError):  # it has ended; only some users may go before others
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)


class Precedence:
    """Of the thread that makes it, on Linux and where the system allows it; elsewhere nothing happens.

    Args:
        by: What is added to its niceness while it has precedence.
    """

    def __init__(self, by: int) -> None:
        self._by = by
        self._is_possible = sys.platform == "linux"
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._keeps_a_core = True

    @contextmanager
    def after_waiting(self) -> Iterator[None]:
        """Around what the thread waits for: then it goes first, until the next time and meanwhile.

        But not meanwhile where it was busy for most of that last time: it computes, or asks its device over and over.
        """
        if self._is_possible and self._keeps_a_core:
            os.setpriority(os.PRIO_PROCESS, 0, self._usual)
        began_s, busy_s = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._keeps_a_core = time.thread_time() - busy_s > (time.monotonic() - began_s) / 2
            self._go_first()

    def _go_first(self) -> None:
        """As far as the system allows it."""
        for by in (self._by, GOES_EARLY):
            if self._is_possible:
                with suppress(PermissionError):
                    os.setpriority(os.PRIO_PROCESS, 0, self._usual + by)
                    return
        self._is_possible = False
