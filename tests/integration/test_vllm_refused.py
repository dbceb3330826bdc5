"""``specdec serve`` with an environment that cannot have the target: a line that names the key, and the end.

An answer of each kind: none, another version, a problem; the others are in ``tests/cluster/test_vllm.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """This Python, which finds modules of ``tmp_path`` before others."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program


def test_there_is_no_such_python() -> None:
    line = refused("/no/such/python")
    assert line.startswith(
        "specdec serve: target.python: /no/such/python must be the Python of an environment with vLLM"
    )
    assert VERSION in line


def test_it_has_another_vllm(python: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.33.0"\n')
    assert f"vLLM is 0.33.0; its internals are known of {VERSION} alone (target.allow_untested" in refused(python)


def test_it_has_another_ray(python: Path, tmp_path: Path) -> None:
    (tmp_path / "ray-9.9.dist-info").mkdir()
    (tmp_path / "ray-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 9.9\n")
    line = refused(python)
    assert f"target.python: {python} has ray 9.9, this one " in line
    assert line.endswith("they must be the same")
