"""Who goes first: each in a process of its own, as a priority once given up is not to be had back everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deployments.transport.priority import GIVES_WAY, GOES_EARLY, GOES_FIRST

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all threads have their process' priority")

SHIFT = """
import os, sys, threading
from deployments.transport.priority import shift_niceness
threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[2] == "as nobody" and os.geteuid() == 0:
    os.setuid(65534)
before = os.getpriority(os.PRIO_PROCESS, 0)
shift_niceness(int(sys.argv[1]))
threads = [int(name) for name in os.listdir("/proc/self/task")]
assert len(threads) > 1
(found,) = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
print(found - before)
"""


def shifted(by: int, who: str = "") -> int:
    """By how much the niceness of all threads of a new process changes."""
    command = [sys.executable, "-c", SHIFT, str(by), who]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def may_go_first() -> bool:
    attempt = "import os; os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)"
    return subprocess.run([sys.executable, "-c", attempt], capture_output=True, check=False).returncode == 0


def test_all_threads_of_an_ingress_give_way() -> None:
    assert shifted(GIVES_WAY) == GIVES_WAY > 0


def test_all_threads_of_a_target_and_a_drafter_go_before_others_where_that_is_allowed() -> None:
    assert GOES_FIRST < GOES_EARLY < 0
    for by in (GOES_FIRST, GOES_EARLY):
        assert shifted(by) == (by if may_go_first() else 0)


@pytest.mark.skipif(os.geteuid() != 0 and may_go_first(), reason="this user may always go first")
def test_where_it_is_not_allowed_priority_stays() -> None:
    assert shifted(GOES_FIRST, "as nobody") == 0
    assert shifted(GIVES_WAY, "as nobody") == GIVES_WAY
