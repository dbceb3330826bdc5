"""The CronJob that trains a draft: its objects are valid, and its command leaves a patch that RayServices take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import specdec
from tests.k8s.examples import EXAMPLES
from tests.k8s.test_examples import what_is_wrong

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = list(yaml.safe_load_all((EXAMPLES / "nightly-draft.yaml").read_text()))
(POD,) = (one["spec"]["jobTemplate"]["spec"]["template"]["spec"] for one in OBJECTS if one["kind"] == "CronJob")
STUB = """#!/bin/sh
case $1 in
    train-draft) mkdir "$8" ;;
    audition) exit {status} ;;
    *) exec {python} -m cluster.cli "$@" ;;
esac
"""


def test_every_object_is_valid() -> None:
    assert [(one["kind"], what_is_wrong(one)) for one in OBJECTS if what_is_wrong(one)] == []


def test_containers_are_locked_down_and_of_this_version() -> None:
    (train,), (deploy,) = POD["initContainers"], POD["containers"]
    assert train["image"] == f"specdec:{specdec.__version__}-cuda"
    assert POD["securityContext"]["runAsNonRoot"] is True
    for one in (train, deploy):
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in one["volumeMounts"]} <= {volume["name"] for volume in POD["volumes"]}


@pytest.mark.parametrize("status", [0, 3], ids=["better", "not better"])
def test_its_command_leaves_the_configuration_in_force_as_a_patch(tmp_path: Path, status: int) -> None:
    places = {name: tmp_path / name for name in ("models", "patch", "scripts", "tmp", "bin")}
    for place in places.values():
        place.mkdir()
    for name in ("recordings", "drafts"):
        (places["models"] / name).mkdir()
    for name, days in (("today", 0), ("yesterday", 1), ("before", 2)):
        (places["models"] / "recordings" / f"{name}.jsonl").write_text("{}\n")
        noon_s = time.time() // 86400 * 86400 - days * 86400 + 43200
        os.utime(places["models"] / "recordings" / f"{name}.jsonl", (noon_s, noon_s))
    service = places["models"] / "drafts" / "config.yaml"
    service.write_text((EXAMPLES / "prod" / "config.yaml").read_text())
    (places["scripts"] / "nightly_draft.sh").write_text((ROOT / "examples/nightly_draft.sh").read_text())
    stub = places["bin"] / "specdec"
    stub.write_text(STUB.format(status=status, python=sys.executable))
    stub.chmod(0o755)
    command = POD["initContainers"][0]["args"][0]
    for name in ("tmp", "models", "patch", "scripts"):  # the others come to be below /tmp
        command = command.replace(f"/{name}/", f"{places[name]}/")
    path = f"{places['bin']}:{os.environ['PATH']}"
    done = subprocess.run(
        [*POD["initContainers"][0]["command"], command],
        env=os.environ | {"PATH": path, "DEPLOY": "true", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    recorded = {name: [one.name for one in (places["tmp"] / name).iterdir()] for name in ("new", "older")}
    assert recorded == {"new": ["yesterday.jsonl"], "older": ["before.jsonl"]}, "today's still grows"
    patch = yaml.safe_load((places["patch"] / "patch.yaml").read_text())
    assert patch.keys() == {"spec"}
    applications = yaml.safe_load(patch["spec"]["serveConfigV2"])["applications"]
    drafts = [one["args"]["draft"]["model"] for one in applications if one["name"] == "specdec-draft"]
    (candidate,) = (places["models"] / "drafts").glob("20*")
    assert drafts == [str(candidate) if status == 0 else "meta-llama/Llama-3.2-1B-Instruct"]
    assert yaml.safe_load(service.read_text())["target"] == {"model": "meta-llama/Llama-3.1-8B-Instruct"}
