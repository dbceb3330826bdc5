"""Cores are kept awake by processes that give way, and that end with the block or with whoever began it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.awake import cores_awake

STARTER = """
import sys, time
from benchmarks.awake import cores_awake
with cores_awake():
    print("ready", flush=True)
    time.sleep(600)
"""


def spinners_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


def test_one_for_each_core_in_the_idle_class() -> None:
    before = set(spinners_of(os.getpid()))
    with cores_awake():
        spinners = set(spinners_of(os.getpid())) - before
        assert sorted(core for s in spinners for core in s.cpu_affinity()) == sorted(os.sched_getaffinity(0))
        assert {os.sched_getscheduler(s.pid) for s in spinners} == {os.SCHED_IDLE}
    assert not any(s.is_running() for s in spinners)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_they_end_with_whoever_began_it(how: signal.Signals) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == "ready\n"
    spinners = spinners_of(starter.pid)
    assert len(spinners) == len(os.sched_getaffinity(0))
    starter.send_signal(how)
    starter.wait(30)
    gone, left = psutil.wait_procs(spinners, timeout=30)
    assert len(gone) == len(spinners)
    assert not left
