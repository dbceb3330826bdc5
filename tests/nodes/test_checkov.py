"""Checkov's checks for Kubernetes on every example of a rendered file: passed, or an exception with its reason."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.k8s.examples import NAMES, built, pods

ROOT = Path(__file__).resolve().parents[2]
BESIDE_OURS = ROOT / ".venv" / "checkov" / "bin" / "checkov"

EXCEPTIONS = {
    "CKV_K8S_21": ("", "the namespace is the user's to name"),
    "CKV_K8S_43": ("", "the image is the user's build, which has no digest yet; Redis goes by its release"),
    "CKV_K8S_15": ("", "tags name releases: a pod that restarts needs no registry"),
    "CKV_K8S_35": ("", "libraries and Redis read tokens and passwords from variables; API keys are a file"),
    "CKV_K8S_8": ("headgroup", "the head's probes are KubeRay's"),
    "CKV_K8S_9": ("headgroup", "the head's probes are KubeRay's"),
    "CKV_K8S_38": ("headgroup", "the autoscaler beside Ray's head talks to the API server"),
}
"""By check: the end of the names of the objects that need not pass it, and why."""


def checkov(file: Path) -> list[tuple[str, str]]:
    """The checks that fail, with the object that each fails on."""
    program = str(BESIDE_OURS) if BESIDE_OURS.exists() else shutil.which("checkov")
    assert program is not None, "checkov is not installed: make test-cluster installs it, beside .venv's own libraries"
    command = [program, "--file", str(file), "--framework", "kubernetes", "--output", "json", "--compact", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0, done.stdout
    return sorted((check["check_id"], check["resource"]) for check in report["results"]["failed_checks"])


@pytest.mark.parametrize("example", NAMES)
def test_what_fails_is_an_exception(example: str, tmp_path: Path) -> None:
    objects = [*built(example), *(pod for _, pod in pods(example))]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(objects))
    failed = checkov(tmp_path / "all.yaml")
    assert [one for one in failed if one[0] not in EXCEPTIONS or not one[1].endswith(EXCEPTIONS[one[0]][0])] == []
    assert {"CKV_K8S_43"} <= {check for check, _ in failed}, "nothing was checked"


def test_what_is_unsafe_is_found(tmp_path: Path) -> None:
    _, pod = next(pods("prod"))
    spec = pod["spec"] | {"hostNetwork": True}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(pod | {"spec": spec}))
    assert "CKV_K8S_19" in {check for check, _ in checkov(tmp_path / "one.yaml")}
