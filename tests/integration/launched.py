"""``specdec serve`` with a small application, in a process group of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


class Service:
    """``specdec serve`` with the small application, in a process group of its own, as a terminal would start it."""

    def __init__(self, *argv):
        self.mark = f"specdec-test-{uuid.uuid4()}"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "SPECDEC_TEST_MARK": self.mark}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.run_stub", "--port", "0", *argv],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def read_until(self, text):
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"no {text!r} in:\n{self.output}")

    def end(self):
        """Exit code, once the process is gone; it ends by itself, or after a signal."""
        self.output += self.process.communicate(timeout=120)[0]
        return self.process.returncode

    def processes(self):
        """All processes that it started, directly or not, whoever their parent is by now; they inherit a mark."""
        return [
            process for process in psutil.process_iter() if process.pid != self.process.pid and self._is_own(process)
        ]

    def _is_own(self, process):
        try:
            is_own = process.environ().get("SPECDEC_TEST_MARK") == self.mark
            return is_own and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@pytest.fixture(name="start")
def start_fixture():
    services = []

    def start_one(*argv):
        services.append(Service(*argv))
        return services[-1]

    yield start_one
    for service in services:
        if service.process.poll() is None:
            service.process.kill()
            service.process.communicate()
        for process in service.processes():
            process.kill()
