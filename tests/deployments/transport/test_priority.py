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
    return int(run(SHIFT, str(by), who))


def run(source: str, *arguments: str) -> str:
    """What a new process prints."""
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def possible(by: int) -> int:
    """How much of it the system allows."""
    attempt = f"import os; os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + {by})"
    is_allowed = subprocess.run([sys.executable, "-c", attempt], capture_output=True, check=False).returncode == 0
    return min(by, 19 - os.getpriority(os.PRIO_PROCESS, 0)) if is_allowed else 0


def may_go_on_at_once() -> bool:
    """Whether this user may run in real time."""
    attempt = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"
    return subprocess.run([sys.executable, "-c", attempt], capture_output=True, check=False).returncode == 0


def test_all_threads_of_an_ingress_give_way() -> None:
    assert shifted(GIVES_WAY) == possible(GIVES_WAY) >= 0


def test_all_threads_of_a_router_go_before_others_where_that_is_allowed() -> None:
    assert shifted(GOES_EARLY) == possible(GOES_EARLY) <= 0


SPARED = """
import os, sys, threading
from deployments.transport.priority import shift_niceness
def waiting():
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread.native_id
machine, other = waiting(), waiting()
before = os.getpriority(os.PRIO_PROCESS, 0)
shift_niceness(int(sys.argv[1]), spared=machine)
assert os.getpriority(os.PRIO_PROCESS, machine) == before
(found,) = {os.getpriority(os.PRIO_PROCESS, thread) for thread in (other, threading.get_native_id())}
print(found - before)
"""


def test_all_threads_of_a_worker_but_its_machines_go_before_others() -> None:
    assert int(run(SPARED, str(GOES_EARLY))) == possible(GOES_EARLY)


@pytest.mark.skipif(os.geteuid() != 0 and possible(-1) < 0, reason="this user may always go first")
def test_where_it_is_not_allowed_priority_stays() -> None:
    assert shifted(GOES_FIRST, "as nobody") == 0
    assert shifted(GIVES_WAY, "as nobody") == possible(GIVES_WAY)


WAIT = """
import errno, os, sys, threading
from types import SimpleNamespace
from deployments.transport import priority
if sys.argv[1] == "one policy":
    def refuse(*_):
        raise OSError(errno.EINVAL, "no such policy here")
    os.sched_setscheduler = refuse
if sys.argv[1] == "as nobody" and os.geteuid() == 0:
    os.setuid(65534)
usual, found, clock = os.getpriority(os.PRIO_PROCESS, 0), [], {"wall": 0.0, "busy": 0.0}
priority.time = SimpleNamespace(monotonic=lambda: clock["wall"], thread_time=lambda: clock["busy"])
def note():
    is_at_once = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR
    found.append("at once" if is_at_once else str(os.getpriority(os.PRIO_PROCESS, 0) - usual))
def main():
    precedence = priority.Precedence(priority.GOES_FIRST, at_once=sys.argv[2] == "at once")
    for busy_s in (0.9, 0.1, 0.1, 0.9, 0.9):
        with precedence.after_waiting():
            note()
            clock["wall"] += 1.0
            clock["busy"] += busy_s
        note()
        child = threading.Thread(target=note)
        child.start()
        child.join()
        assert found.pop() != "at once"
thread = threading.Thread(target=main)
thread.start()
thread.join()
assert os.getpriority(os.PRIO_PROCESS, 0) == usual
print(*found, sep=",")
"""


@pytest.mark.parametrize("how", ["at once", "nicely"])
def test_a_thread_goes_first_after_what_it_waits_for_and_meanwhile_unless_it_keeps_a_core(how: str) -> None:
    first = str(possible(GOES_FIRST) or possible(GOES_EARLY))
    if how == "at once" and may_go_on_at_once():
        first = how
    expected = ["0", first, "0", first, first, first, first, first, "0", first]
    assert run(WAIT, "", how).strip().split(",") == expected


@pytest.mark.skipif(os.geteuid() != 0 and possible(-1) < 0, reason="this user may always go first")
def test_a_thread_that_may_not_go_first_stays_where_it_is() -> None:
    assert set(run(WAIT, "as nobody", "at once").strip().split(",")) == {"0"}


def test_where_there_is_one_policy_only_a_thread_goes_first_nicely() -> None:
    first = str(possible(GOES_FIRST) or possible(GOES_EARLY))
    expected = ["0", first, "0", first, first, first, first, first, "0", first]
    assert run(WAIT, "one policy", "at once").strip().split(",") == expected
