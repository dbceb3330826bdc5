"""The processes that this one started, and theirs: told apart from all others, and stopped without fail."""

from __future__ import annotations

import contextlib
import time

import psutil


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
        return [process for process in self._seen if process.is_running() and not _is_zombie(process)]

    def stop(self, grace_s: float) -> int:
        """End what is left: wait ``grace_s`` seconds for it to end by itself, then ask, then kill.

        Returns:
            How many processes had to be killed.
        """
        self.note()
        self._wait(grace_s)
        for process in self.alive():
            _signal(process, "terminate")
        self._wait(min(grace_s, 2.0))
        left = self.alive()
        for process in left:
            _signal(process, "kill")
        self._wait(2.0)
        return len(left)

    def _wait(self, timeout_s: float) -> None:
        """Wait until none is alive; ``psutil.wait_procs`` would wait for zombies that are another's to collect."""
        deadline_s = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline_s:
            time.sleep(0.02)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _signal(process: psutil.Process, how: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        getattr(process, how)()
