"""Running something that starts many processes so that all of them end with it, however it ends.

The processes that this one started, and theirs: told apart from all others, and stopped without fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import psutil

TERMINATE_S = 2.0
KILL_S = 2.0


class OwnProcesses:
    """Every process seen below this one. A process is known by id and start time, so that no other is ever touched."""

    def __init__(self) -> None:
        self._root = psutil.Process()
        self._before = set(self._root.children(recursive=True))
        self._seen: set[psutil.Process] = set()

    def note(self) -> None:
        """Remember what runs below this process now; children of a process that ends are not found any more later."""
        self._seen.update(set(self._root.children(recursive=True)) - self._before)

    def alive(self) -> list[psutil.Process]:
        """Those of the processes seen that still run."""
        return [process for process in self._seen if is_alive(process)]

    def stop(self, grace_s: float) -> int:
        """End what is left: wait ``grace_s`` seconds for it to end by itself, then ask, then kill; kill at once for 0.

        Returns:
            How many processes had to be killed.
        """
        self.note()
        if grace_s > 0:
            self._wait(grace_s)
            for process in self.alive():
                _signal(process, "terminate")
            self._wait(TERMINATE_S)
            self.note()
        left = self.alive()
        for process in left:
            _signal(process, "kill")
        self._wait(KILL_S)
        return len(left)

    def _wait(self, timeout_s: float) -> None:
        """Wait until none is alive; ``psutil.wait_procs`` would wait for zombies that are another's to collect."""
        deadline_s = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline_s:
            time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended, but was not waited for, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, how: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        getattr(process, how)()


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.05
STOP_TIMEOUT_S = 60.0
RAISE_AGAIN_S = 3
GRACE_S = 5.0
EXIT_FAILED = 1
EXIT_FORCED = 130

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class StopRequested(KeyboardInterrupt):
    """Whoever runs this process wants it to stop; raised in the main thread of the supervised process."""


def supervised(body: Callable[[], int], grace_s: float = GRACE_S, stop_timeout_s: float = STOP_TIMEOUT_S) -> int:
    """Run ``body`` in a child process, and leave no process of its behind.

    The child is in a session of its own: what a terminal or a process manager sends to the whole group reaches this
    process alone, and is passed on to the child once, as :class:`StopRequested`. A second signal, or a child that does
    not end within ``stop_timeout_s``, ends everything at once. Orphans of the child become children of this process (on
    Linux), so that they are found and waited for. To be called last, and before any thread is started: the signals stay
    taken over.

    Args:
        body: Returns an exit code.
        grace_s: How long what the child leaves behind may take to end by itself.
        stop_timeout_s: How long the child may take to end after it was told to stop.

    Returns:
        The child's code; 0 after a stop that was asked for; 130 after one that had to be forced.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    processes = OwnProcesses()
    _flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child == 0:
        _run_child(body)
    received: list[int] = []
    _handle(lambda signum, _: received.append(signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    code = _wait(child, received, stop_timeout_s)
    forced = code is None or len(received) > 1
    processes.stop(0.0 if forced else grace_s)
    if forced:
        return EXIT_FORCED
    return 0 if received else EXIT_FAILED if code is None or code < 0 else code


def catch_stop() -> None:
    """Turn the stop signals into :class:`StopRequested`; to be called again after a library has taken them."""
    _handle(_raise_stop)


def stop_begun() -> None:
    """Say that :class:`StopRequested` was caught: it is not raised again."""
    signal.alarm(0)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for name in STOP_SIGNALS:
        if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:  # nohup
            signal.signal(name, handler)


def _raise_stop(signum: int, frame: FrameType | None) -> None:
    """Raise, and again in a while unless it was caught: where Python ignores exceptions, one raised is lost."""
    signal.signal(signal.SIGALRM, _raise_stop)
    signal.alarm(RAISE_AGAIN_S)
    raise StopRequested


def _run_child(body: Callable[[], int]) -> None:
    """Never returns: what the parent's callers would do at their end is not the child's to do."""
    code = EXIT_FAILED
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        catch_stop()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        code = body()
    except StopRequested:
        stop_begun()
        code = 0
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    """Write out what is printed, where somebody still takes it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def _wait(child: int, received: list[int], stop_timeout_s: float) -> int | None:
    """Pass the first signal on and wait for the child; None where it is not waited for any longer."""
    deadline_s = None
    while True:
        for pid, status in _ended_children():
            if pid == child:
                return os.waitstatus_to_exitcode(status)
        if received and deadline_s is None:
            deadline_s = time.monotonic() + stop_timeout_s
            os.kill(child, signal.SIGTERM)
        if len(received) > 1 or (deadline_s is not None and time.monotonic() > deadline_s):
            return None
        time.sleep(POLL_S)


def _ended_children() -> Iterator[tuple[int, int]]:
    """Process id and status of each child that has ended: the one we started, and orphans that became ours.

    An orphan that nobody waits for would stay in the process table for as long as this process lives.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
