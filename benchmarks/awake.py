"""Cores that do not fall asleep while something is measured that waits for emulated devices.

    python -m benchmarks.awake python -m benchmarks.modes --backend benchmarks.backends:stand_in:target=30,draft=3 ...

A process that waits for a real device is awake in time; but a virtual machine whose cores have nothing to do gives them
back to its host, which on a busy host takes milliseconds to return them. That would be counted as the system's own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from specdec.core.errors import InvalidParameterError

_SPIN = "import os\nwhile os.getppid() == {parent}:\n for _ in range(1000000): pass"
"""Ends by itself soon after whoever started it."""


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """A process per usable core that does nothing, in the idle class of the scheduler: all others go before it.

    Raises:
        InvalidParameterError: The system has no such class.
    """
    if not hasattr(os, "SCHED_IDLE"):
        raise InvalidParameterError("keep_cores_awake", "keep_cores_awake works on Linux only")
    spinners: list[subprocess.Popen[bytes]] = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            spinners.append(_spinner(core))
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()


def _spinner(core: int) -> subprocess.Popen[bytes]:
    source = _SPIN.format(parent=os.getpid())
    spinner = subprocess.Popen([sys.executable, "-S", "-c", source], start_new_session=True)
    os.sched_setscheduler(spinner.pid, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(spinner.pid, {core})
    with contextlib.suppress(OSError):  # where sessions are scheduled as groups, the group has to give way too
        Path(f"/proc/{spinner.pid}/autogroup").write_text("19")
    return spinner


if __name__ == "__main__":
    with cores_awake():
        sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)
