"""The comparison of two checkouts: what it says of figures, and that a service's whole processor time is counted."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from benchmarks.versions import processor_s, table


def test_the_ratio_is_of_neighbours_and_not_of_medians() -> None:
    rounds = [(100.0, 90.0, 1.0, 1.5), (200.0, 180.0, 1.1, 1.6), (50.0, 45.0, 1.2, 1.7)]
    assert table({"8": rounds}).splitlines()[-1] == "| 8 | 3 | 100.0 | 90.0 | 0.90 (0.90 to 0.90) | 1.10 | 1.60 |"


def test_processor_time_is_that_of_children_too() -> None:
    code = "import sys; sum(range(20_000_000)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        times = psutil.Process(child.pid).cpu_times()
        before_s = sum(os.times()[:2])
        assert processor_s(psutil.Process()) >= before_s + times.user > before_s
        child.stdin.close()
