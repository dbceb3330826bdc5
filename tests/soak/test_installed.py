"""The wheel in an environment of its own, away from the clone: what its users type."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.integration.running import RunningService
from tests.k8s.examples import EXAMPLES, NAMES

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "specdec", "cluster", "deployments")
TIMEOUT_S = 240
NO_CLONE = {"PYTHONPATH": ""}


class Installed:
    """An environment that has the wheel, and of everything else what this one has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "env")
        self._bin = folder / "env" / "bin"
        self.python = self._bin / "python"
        wheel = built_wheel(folder)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install"]
        subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", str(wheel)], check=True, timeout=240)
        # A plain path: what this environment has as editable is not found by it.
        (libraries,) = (self._bin.parent / "lib").glob("python*/site-packages")
        (libraries / "others.pth").write_text(sysconfig.get_path("purelib"))

    def environment(self) -> dict[str, str]:
        """The one that commands run in."""
        return os.environ | NO_CLONE | {"PATH": f"{self._bin}:{os.environ['PATH']}"}

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """What a command prints; it must end well."""
        program = str(self._bin / words[0])
        done = subprocess.run(
            [program, *words[1:]],
            cwd=cwd or self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def built_wheel(folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        here = ROOT / name
        if here.is_dir():
            shutil.copytree(here, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(here, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True, timeout=240)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith("specdec_serve-")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


def test_it_is_the_wheel_that_runs(installed: Installed) -> None:
    where = "import specdec, cluster, deployments; print(specdec.__file__, cluster.__file__, deployments.__file__)"
    assert installed.run("python", "-c", where).count(str(installed.folder)) == 3
    assert installed.run("specdec", "--version").startswith("specdec 0.")


@pytest.mark.parametrize("example", NAMES)
def test_it_renders_what_the_clone_does(installed: Installed, example: str) -> None:
    printed = installed.run("specdec", "render", str(EXAMPLES / example / "config.yaml"))
    assert printed == (EXAMPLES / example / "rayservice.yaml").read_text()


def test_it_generates_and_examines(installed: Installed) -> None:
    assert installed.run("specdec", "generate", "It was", "--max-tokens", "3")
    assert "can be served" in installed.run("specdec", "doctor", "--target-kv-cache-memory", "64MiB")


def test_it_serves(installed: Installed) -> None:
    service = RunningService(python=str(installed.python), folder=installed.folder, environment=NO_CLONE)
    try:
        model = service.model
        assert service.client().completions.create(model=model, prompt="It was", max_tokens=3).usage is not None
        assert str(installed.folder) in " ".join(part for child in service.children() for part in child.cmdline())
    finally:
        assert service.stop() == 0
