"""What can be said of the Dockerfile without building it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import specdec

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_label_has_the_packages_version() -> None:
    assert f'org.opencontainers.image.version="{specdec.__version__}"' in DOCKERFILE


def test_what_is_compiled_for_a_gpu_has_a_compiler_and_headers_and_is_kept_where_the_user_may_write() -> None:
    (home,) = re.findall(r"HOME=(/home/\S+)", DOCKERFILE)
    caches = re.findall(r"(?:TRITON|TORCHINDUCTOR)_CACHE_DIR=(\S+)", DOCKERFILE)
    assert [Path(folder).is_relative_to(home) for folder in caches] == [True, True]
    assert "--create-home" in DOCKERFILE
    assert re.search(r'"\$\{VARIANT\}" != cpu .*apt-get install .* g\+\+', DOCKERFILE)
    assert "Python.h" in DOCKERFILE


def test_both_variants_are_built_by_the_same_stages() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert len(stages) == DOCKERFILE.count("\nFROM ")
    assert stages[-1] == ("base", "service")
    assert not [name for stage in stages for name in stage if "cuda" in name or "cpu" in name or "VARIANT" in name]


def test_with_and_without_vllm_there_is_one_ray() -> None:
    """Pods with another version cannot join a cluster; llguidance is taken from constraints.txt for both."""
    plain, vllm = ((ROOT / f"constraints{name}.txt").read_text().splitlines() for name in ("", "-vllm"))
    (ray,) = [line for line in plain if line.startswith("ray==")]
    assert ray in vllm
    assert not [line for line in vllm if line.startswith("llguidance==")]
    assert "!constraints-vllm.txt" in (ROOT / ".dockerignore").read_text().splitlines()
