"""The CPU image, built on a Debian that is made here, and the service in it."""

from __future__ import annotations

import json
import re
import subprocess
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.launch.local import check_port
from tests.image.buildah import Buildah, built, said

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/specdec"
BASE = "localhost/debian-python"
USER = 10001
WRITABLE = {"/home/specdec", "/models", "/tmp", "/run/lock", "/var/tmp"}
"""What belongs to the image's user, or to everybody; nothing is written in the last two."""
START_TIMEOUT_S = 300

pytestmark = pytest.mark.timeout(14400)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """The image, in a storage that goes with the tests."""
    with built(tmp_path_factory.mktemp("buildah"), ROOT, IMAGE, BASE) as buildah:
        yield buildah


@pytest.fixture(scope="module")
def config(buildah: Buildah) -> dict[str, Any]:
    return buildah.config(IMAGE)


@pytest.fixture(scope="module")
def container(buildah: Buildah) -> str:
    return buildah("from", "--pull-never", IMAGE, timeout_s=1800)


@pytest.fixture(scope="module")
def root(buildah: Buildah, container: str) -> Path:
    """The container's files."""
    return Path(buildah("mount", container))


def test_it_says_how_it_is_run(config: dict[str, Any]) -> None:
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] == ["tini", "--", "specdec"]
    assert config["Cmd"] == ["serve"]
    assert set(config["ExposedPorts"]) == {"8000/tcp"}
    assert config["Healthcheck"]["Test"][:3] == ["CMD", "sh", "-c"]
    assert config["Labels"]["org.opencontainers.image.title"] == "specdec"


def test_a_pod_of_kuberay_finds_what_it_runs(buildah: Buildah, container: str) -> None:
    asked = "id -u && command -v wget grep ray serve specdec && ray --version && python -c 'import deployments.app'"
    first, *_ = said(buildah, container, "/bin/bash", "-c", asked).splitlines()
    assert first == str(USER)


def test_its_user_can_write_nowhere_but_where_the_dockerfile_says(buildah: Buildah, container: str) -> None:
    skipped = "-path /proc -o -path /sys -o -path /dev -o -type d -not -readable"
    search = f"find / -xdev ( {skipped} ) -prune -o -not -type l -writable -print -prune"
    found = set(said(buildah, container, *search.split()).split())
    assert {"/home/specdec", "/models", "/tmp"} <= found <= WRITABLE


def test_no_cache_and_no_setting_of_the_builder_is_left(root: Path) -> None:
    for folder in ("var/lib/apt/lists", "var/cache/apt", "root", "home/specdec", "models", "build", "dist"):
        left = [path for path in (root / folder).rglob("*") if path.is_file() and not path.name.startswith(".")]
        assert not left, folder
    assert not (root / "etc/pip.conf").exists()
    # torch makes an empty folder for its compiler, as soon as it is imported.
    assert not [path for path in root.glob("**/.cache/**/*") if path.is_file()]


def test_only_what_the_package_is_made_of_is_in_it(root: Path) -> None:
    (packages,) = root.glob("opt/specdec/lib/python3.11/site-packages")
    top = {line.partition("/")[0] for line in record(packages).splitlines()}
    assert {name for name in top if "." not in name} == {"specdec", "cluster", "deployments"}


def record(packages: Path) -> str:
    (metadata,) = packages.glob("specdec_serve-*.dist-info")
    return (metadata / "RECORD").read_text()


def test_the_bill_of_materials_names_what_constraints_pin(root: Path) -> None:
    bill = json.loads((root / "opt/specdec/specdec.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "specdec-serve"
    versions = {component["name"].lower().replace("_", "-"): component["version"] for component in bill["components"]}
    pinned = dict(re.findall(r"^([^#=\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [re.split(r"[\[<>=]", line)[0] for line in project["dependencies"]]
    assert {name: versions[name].partition("+")[0] for name in required} == {name: pinned[name] for name in required}
    assert "pytest" not in versions


def test_the_service_answers_in_it_and_ends(
    buildah: Buildah, container: str, root: Path, config: dict[str, Any]
) -> None:
    port = check_port("127.0.0.1", 0)
    environment = {"SPECDEC__HOST": "127.0.0.1", "SPECDEC__PORT": str(port)}
    health = config["Healthcheck"]["Test"][1:]
    began_s = time.time()
    log = buildah.folder / "serve.log"
    words = [*config["Entrypoint"], *config["Cmd"]]
    with log.open("w") as output:
        serving = subprocess.Popen(
            buildah.run_command(container, *words, **environment), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while "Try it:" not in log.read_text():
                assert serving.poll() is None, log.read_text()
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.5)
            below = psutil.Process(serving.pid).children(recursive=True)
            (tini,) = [process for process in below if process.name() == "tini"]
            processes = [tini, *tini.children(recursive=True)]
            assert {process.uids().real for process in processes} == {USER}
            body = {"model": "specdec-demo", "prompt": "def fibonacci(n):", "max_tokens": 16, "temperature": 0}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                (choice,) = json.load(answer)["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["text"].strip()
            said(buildah, container, *health, **environment)
            tini.terminate()
            assert serving.wait(120) == 0, log.read_text()
            assert not [process for process in processes if process.is_running()]
        finally:
            if serving.poll() is None:
                for process in [*psutil.Process(serving.pid).children(recursive=True), psutil.Process(serving.pid)]:
                    process.kill()
                serving.wait()
    ill = subprocess.run(buildah.run_command(container, *health, **environment), capture_output=True, timeout=60)
    assert ill.returncode == 1
    written = {
        path.relative_to(root).parts[0]
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and path.lstat().st_uid == USER and path.lstat().st_mtime > began_s
    }
    assert written <= {"tmp", "home"}
