"""``specdec serve`` with an environment that cannot have the target: a line that names the key, and the end.

The other answers are in ``tests/thorough/cluster/test_vllm.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from specdec.engine.vllm.checks import VERSION
from tests.integration.running import ROOT, free_port

TIMEOUT_S = 200
"""Guards against hanging."""


def refused(python: Path | str) -> str:
    """What ``specdec serve`` says last of a target whose Python that is; it must end by itself, as for a wrong key."""
    flags = ("--demo", "plain", "--port", str(free_port()), "--target-engine", "vllm", "--target-python", str(python))
    command = [sys.executable, "-m", "cluster.cli", "serve", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Try it:" not in done.stdout
    return done.stderr.splitlines()[-1]


def test_there_is_no_such_python() -> None:
    line = refused("/no/such/python")
    assert line.startswith(
        "specdec serve: target.python: /no/such/python must be the Python of an environment with vLLM"
    )
    assert VERSION in line
