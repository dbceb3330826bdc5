"""The processes that this one started, and theirs: told apart from all others, and stopped without fail."""

from __future__ import annotations

import contextlib
import time

import psutil

TERMINATE_S = 2.0
KILL_S = 2.0


class OwnProcesses:
    """Every process seen below this one. A process is known by id and start time, so that no other is ever touched."""

    def __init__(self, root: psutil.Process | None = None) -> None:
        self._root = root or psutil.Process()
        self._before = set(self._root.children(recursive=True))
        self._seen: set[psutil.Process] = set()

    def note(self) -> None:
        """Remember what runs below this process now; children of a process that ends are not found any more later."""
        self._seen.update(set(self._root.children(recursive=True)) - self._before)

    def alive(self) -> list[psutil.Process]:
        """Those of the processes seen that still run."""
        return [process for process in self._seen if is_alive(process)]

    def children(self, *names: str) -> list[psutil.Process]:
        """Processes that the root itself has started and that are called so."""
        return [process for process in self._root.children() if process.name() in names]

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
