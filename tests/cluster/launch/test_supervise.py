from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.launch.supervise import is_alive

ROOT = Path(__file__).resolve().parents[3]
GRANDCHILD = "import time; time.sleep(300)"
STUBBORN_GRANDCHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
SCRIPT = """
import os, signal, subprocess, sys, time
from cluster.launch.supervise import supervised

def body():
    own = subprocess.Popen([sys.executable, "-c", {grandchild!r}], start_new_session=True)
    print(os.getpid(), own.pid, flush=True)
    sys.stdin.readline()  # until the test has looked at both
    {then}

sys.exit(supervised(body, grace_s=0.1))
"""
WAIT = "time.sleep(300)"


@pytest.fixture
def start():
    started = []

    def start_one(then, grandchild=GRANDCHILD):
        """The supervisor, and the process ids of its child and of the child's child."""
        script = SCRIPT.format(grandchild=grandchild, then=then)
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where these tests run under nohup
        )
        family = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.stdin.write("known\n")
        process.stdin.flush()
        started.append((process, family))
        return process, family

    yield start_one
    for process, family in started:
        for one in (process, *(one for one in family if is_alive(one))):
            one.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("return 0", 0),
        ("return 2", 2),
        ("raise SystemError", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
        ("os._exit(7)", 7),
    ],
)
def test_however_the_child_ends_nothing_is_left(start, then, code):
    process, family = start(then)
    assert process.wait(timeout=60) == code
    assert [one for one in family if is_alive(one)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a pipe does not say that its reader has gone")
def test_output_that_nobody_takes_changes_nothing(start):
    process, family = start("import select; p = select.poll(); p.register(1, 0); p.poll(); print(1); return 7")
    process.stdout.close()
    assert process.wait(timeout=60) == 7
    assert [one for one in family if is_alive(one)] == []


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_stops_the_child_once(start, name):
    process, family = start(WAIT)
    os.killpg(process.pid, name)
    assert process.wait(timeout=60) == 0
    assert [one for one in family if is_alive(one)] == []


def test_what_does_not_end_is_killed(start):
    process, family = start("return 0", STUBBORN_GRANDCHILD)
    assert process.wait(timeout=60) == 0
    assert [one for one in family if is_alive(one)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a process the orphans of its children")
def test_an_adopted_orphan_that_ends_is_waited_for(start):
    process, _ = start(f"subprocess.run(['sh', '-c', 'sleep 0.5 & echo $!']); {WAIT}")
    orphan = int(process.stdout.readline())
    deadline_s = time.monotonic() + 30
    while psutil.pid_exists(orphan) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(orphan), "it is a zombie"
    assert process.poll() is None


def test_a_second_signal_does_not_wait(start):
    stubborn = "while True:\n try:\n  print(1, flush=True)\n  time.sleep(300)\n except BaseException: pass"
    process, family = start(f"exec({stubborn!r})")
    assert process.stdout.readline() == "1\n", "it is where no signal ends it"
    process.terminate()
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=5) == 130
    assert [one for one in family if is_alive(one)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs the signal that Linux sends at a parent's death")
def test_the_child_does_not_outlive_a_killed_supervisor(start):
    process, (child, _) = start(WAIT)
    process.kill()
    process.wait()
    deadline_s = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_alive(child)
