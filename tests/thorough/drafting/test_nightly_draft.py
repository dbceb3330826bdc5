"""The nightly script: a better draft is deployed, but not if it is worse on older recordings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from specdec import SamplingParams, SpeculativeEngine
from specdec.audition.recording import Sample, write_recording
from tests.specdec.audition.learned import OUTPUT_TOKENS, cycles
from tests.specdec.engine.features import OPTIONS, demo
from tests.specdec.vocabularies import DRAFT

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).resolve().parents[3] / "examples/nightly_draft.sh"


class Night:
    """A folder with a service's configuration and its recordings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.drafts = folder, folder / "drafts"
        self.drafts.mkdir(exist_ok=True)
        shutil.copytree(DRAFT, folder / "draft")
        self.service = folder / "service.yaml"
        self.service.write_text(
            f"target: {DRAFT.parent / 'target'}\ndraft:\n# a remark\n  model: {folder / 'draft'}\n"
            "  kv_cache_memory: 64MiB\nmax_model_len: 64\n"
        )
        command = folder / "bin" / "specdec"
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cluster.cli "$@"\n')
        command.chmod(0o755)

    def run(self, new: Sequence[Sample], older: Sequence[Sample]) -> str:
        """Run the script; returns what it printed."""
        files = []
        for name, samples in (("new", new), ("older", older)):
            (self.folder / name).mkdir(exist_ok=True)
            write_recording(self.folder / name / "r.jsonl", samples)
            files.append(str(self.folder / name))
        done = subprocess.run(
            [SCRIPT, self.service, *files, self.drafts],
            env=os.environ
            | {
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": str(SCRIPT.parents[1]),
                "DEPLOY": f"cp -t {self.folder / 'bin'}",
                "TRAINING": "--epochs 2 --batch-tokens 256 --learning-rate 0.003",
            },
            capture_output=True,
            text=True,
            timeout=560,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def deployed(self) -> str | None:
        """The draft in the configuration that was deployed."""
        path = self.folder / "bin" / "serve.yaml"
        if not path.exists():
            return None
        applications = {one["name"]: one for one in yaml.safe_load(path.read_text())["applications"]}
        return applications["specdec-draft"]["args"]["draft"]["model"]


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


def test_a_better_draft_is_deployed(night: Night) -> None:
    printed = night.run(cycles(150), cycles(50, seed=1))
    (candidate,) = night.drafts.glob("20*")
    assert "nothing is worse" not in printed
    assert printed.endswith(f"{candidate} is deployed\n")
    assert night.deployed == str(candidate)
    service = yaml.safe_load(night.service.read_text())
    assert service["draft"] == {"model": str(candidate), "kv_cache_memory": "64MiB"}
    assert service["target"] == str(DRAFT.parent / "target")
    again = night.run(cycles(150), cycles(50, seed=1))
    assert again == f"{candidate} was deployed before: {candidate} stays\n"
    assert (candidate / "model.safetensors").exists()


def test_a_night_without_recordings_changes_nothing(night: Night) -> None:
    assert night.run([], cycles(50)) == f"{night.folder / 'new'} has no recordings: {night.folder / 'draft'} stays\n"
    assert list(night.drafts.iterdir()) == []


def test_a_draft_that_is_worse_on_older_recordings_is_not(night: Night) -> None:
    engine = SpeculativeEngine.from_pretrained(demo("draft"), options=OPTIONS)  # says what the draft would
    prompts = [one.prompt_token_ids for one in cycles(120, seed=2)]
    older = [
        replace(Sample.of(result), system_fingerprint="fp")
        for result in engine.generate_batch(prompts, SamplingParams(temperature=0.0), max_tokens=OUTPUT_TOKENS)
    ]
    before = night.service.read_text()
    printed = night.run(cycles(150), older)
    assert "is better than" in printed
    assert "is worse than" in printed
    assert printed.endswith(f"{night.folder / 'draft'} stays\n")
    assert night.deployed is None
    assert night.service.read_text() == before
    assert [one.name for one in night.drafts.glob("20*/*")] == ["refused"]
    assert night.run(cycles(150), older).endswith("stays\n"), "a second run that day does not train again"
