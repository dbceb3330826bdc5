"""Images built and run by Debian's buildah, in a storage of their own."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}
"""What is run, and the Debian package that it is in."""


def check_programs() -> None:
    """Raise where a program is lacking, and say how it is had."""
    lacking = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    assert not lacking, f"Install {' and '.join(lacking)} first (Debian, Ubuntu: apt install {' '.join(lacking)})"


def run(command: list[str], timeout_s: float) -> str:
    """What the command prints; fails with all it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-20_000:]}\n{done.stderr[-20_000:]}"
    return done.stdout


@dataclass(frozen=True)
class Buildah:
    """buildah, its storage in a folder."""

    folder: Path

    def command(self, name: str, *arguments: object) -> list[str]:
        """The command line of one of buildah's commands."""
        storage = ["--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run", "--storage-driver", "vfs"]
        return ["buildah", *storage, name, *map(str, arguments)]

    def __call__(self, name: str, *arguments: object, timeout_s: float = 120) -> str:
        """Run one of its commands; gives what it prints."""
        return run(self.command(name, *arguments), timeout_s).strip()

    def import_base(self, image: str) -> None:
        """Make an image of a small Debian with Python 3.11, as its packages have it."""
        archive = self.folder / "base.tar"
        how = ["--variant=minbase", "--include=python3.11,python3.11-venv", *apt_options()]
        run(["mmdebstrap", *how, "bookworm", str(archive)], 3600)
        container = self("from", "scratch")
        self("add", container, archive, "/", timeout_s=1800)
        archive.unlink()
        self("commit", "--rm", container, image, timeout_s=1800)

    def build(self, source: Path, image: str, **arguments: str) -> None:
        """Build a folder's Dockerfile with what pip is told on this machine; nothing of that is in the image."""
        settings, mounts = pip_settings()
        config = self.folder / "pip.conf"
        config.write_text(settings)
        self(
            "build",
            *("--isolation", "chroot", "--network", "host", "--format", "docker"),
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            f"--secret=id=pip,src={config}",
            *(f"--volume={path}:{there}:ro" for path, there in mounts.items()),
            *("--tag", image, source),
            timeout_s=7200,
        )

    def config(self, image: str) -> dict[str, Any]:
        """What the image says of how it is run, as Docker has it."""
        described = json.loads(self("inspect", "--type", "image", image))
        config: dict[str, Any] = described["Docker"]["config"]
        return config

    def run_command(self, container: str, *words: str, **environment: str) -> list[str]:
        """The command line that runs a program in the container, as the image's user, in this machine's network."""
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        return self.command("run", "--isolation", "chroot", "--network", "host", *variables, container, "--", *words)


@contextmanager
def built(folder: Path, source: Path, image: str, base: str, **arguments: str) -> Iterator[Buildah]:
    """An image, built on a small Debian, in a storage that goes afterwards."""
    check_programs()
    buildah = Buildah(folder)
    try:
        buildah.import_base(base)
        buildah.build(source, image, BASE=base, **arguments)
        yield buildah
    finally:
        subprocess.run(buildah.command("rm", "--all"), timeout=1200)
        subprocess.run(buildah.command("rmi", "--all", "--force"), timeout=1200)


def said(buildah: Buildah, container: str, *words: str, **environment: str) -> str:
    """What a program in the container prints; it must end well."""
    command = buildah.run_command(container, *words, **environment)
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def apt_options() -> list[str]:
    """What this machine's apt is told of proxies and of the dates of lists, for a Debian that is made here."""
    dumped = run(["apt-config", "dump", "Acquire"], 60)
    found = re.findall(r"^(Acquire::(?:Check-\w|\w+::Proxy).*);$", dumped, flags=re.MULTILINE)
    return [f"--aptopt={option}" for option in found]


def pip_settings() -> tuple[str, dict[Path, str]]:
    """pip's settings on this machine, a file's text, and where to mount what they name of it."""
    listed = run([sys.executable, "-m", "pip", "config", "list"], 60).splitlines()
    settings: dict[str, str] = {}
    for line in sorted(listed, key=lambda line: line.startswith(":env:")):  # the environment wins
        name, _, value = line.partition("=")
        section, _, key = name.replace(":env:", "global").partition(".")
        if section in ("global", "install"):
            settings[key] = " ".join(str(ast.literal_eval(value)).split())
    mounts: dict[Path, str] = {}

    def mounted(named: re.Match[str]) -> str:
        path = Path(named[2])
        if not path.exists():
            return named[0]
        folder = path.parent if path.name == "simple" else path  # an index's files lie beside its pages
        mounts[folder] = f"/mnt{folder}"
        return f"{named[1] or ''}/mnt{path}"

    lines = [f"{key} = {value}" for key, value in settings.items()]
    text = re.sub(r"(?<![\w:/.])(file://)?(/\S+)", mounted, "\n".join(["[global]", *lines, ""]))
    return text, mounts
