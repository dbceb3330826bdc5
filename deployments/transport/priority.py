"""Who goes first where processes of one machine want the same cores.

A step of the target cannot begin before its machine has had its turn, and all of its sequences wait meanwhile; the text
of a stream may be a moment late. So a target goes before all others, drafters and routers before what only passes text
on, and an ingress gives way to all. A worker whose model computes on the cores themselves stays where it is: it would
keep everybody else from them.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

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
