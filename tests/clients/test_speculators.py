"""EAGLE-3 heads that the ``speculators`` package saves say what its own module says; behind ``make test-clients``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.drafting.heads import HeadsOptions, load_heads
from specdec.executor.rows import HeadInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from tests.specdec.models.families import make_model

PYTHON = Path(sys.prefix) / "speculators/bin/python"
SCRIPT = Path(__file__).with_name("save_speculators.py")
CASES = [
    ("llama", "speculators"),
    ("qwen3", "speculators"),
    ("llama", "speculators", "norm_before_residual", "fc_norm"),
    ("qwen3", "speculators", "norm_before_fc", "norm_output", "two_layers"),
    ("llama", "authors"),
]


@torch.inference_mode()
def said_by_place(folder: Path, states: Tensor, tokens: list[int], embeddings: Tensor) -> list[Tensor]:
    """Our logits for the places of a draft after each position, whose tokens are those that follow in the text."""
    model = make_model("llama")
    model.get_input_embeddings().weight.copy_(embeddings)  # for a head that has none
    loaded, heads = load_heads(HeadsOptions(str(folder), 3, method="eagle3"), prepare_model(model, "tiny"))
    runner = ModelRunner(loaded, num_blocks=16, block_size=4)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, len(tokens) + 3)
    fused = heads.fuse(states.chunk(3, dim=1))
    by_place: list[list[Tensor]] = [[], [], []]
    for end in range(1, len(tokens) - 1):
        start = end - 1  # what was drafted before is written over
        features = runner.forward_heads(heads.forward, [HeadInput(sequence, start, [tokens[start]])], fused[start:end])
        for place, of_place in enumerate(by_place):
            if place:
                drafted = HeadInput(sequence, start + place, [tokens[start + place]])
                features = runner.forward_heads(heads.forward, [drafted], features)
            of_place.append(heads.logits(features, place))
    return [torch.cat(of_place) for of_place in by_place]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_logits_are_those_of_the_package(case: tuple[str, ...], tmp_path: Path) -> None:
    subprocess.run([PYTHON, SCRIPT, tmp_path, *case], check=True, timeout=300)
    said = load_file(tmp_path / "said.safetensors")
    ours = said_by_place(tmp_path / "head", said["states"], said["tokens"].tolist(), said["embeddings"])
    known = ours[0].isfinite().all(0)
    assert known.sum() == said["logits_0"].shape[1] < len(known)
    for place, logits in enumerate(ours):
        wanted = said[f"logits_{place}"][: len(logits)]
        assert not logits[:, ~known].isfinite().any()
        torch.testing.assert_close(logits[:, known], wanted, rtol=1e-4, atol=1e-4)
