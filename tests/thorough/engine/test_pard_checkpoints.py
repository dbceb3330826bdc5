"""PARD checkpoints as their authors publish them: a pass says what the authors' own inference computes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from specdec.core.backends import DraftJob, Status
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.build import BackendOptions, build_drafter
from specdec.models.describe import describe_pair
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.sampling.pipeline import RowGroup
from tests.specdec.models.families import randomize
from tests.specdec.vocabularies import DRAFT

WIDTH, MASK = 4096, 4100
"""Of the tokenizer; and a token that it lacks, as Qwen's mask tokens are."""
SHAPE = {
    "vocab_size": WIDTH + 16,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
PARD = {"pard_token": MASK, "spd_type": "pard"}
PARD2 = PARD | {
    "spd_type": "pard2",
    "pard2": True,
    "pard2_scale": 0.02,
    "pard2_proj_bias": False,
    "pard2_target_dim": 256,
    "pard2_target_layers": [-1],
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "PARD-Llama-3.2-1B": ("llama", PARD | {"rope_parameters": LLAMA3_ROPE}),
    "PARD-Qwen2.5-0.5B": ("qwen2", PARD),
    "PARD-Qwen3-0.6B": ("qwen3", PARD),
    "PARD2-Qwen3-8B": ("qwen3", PARD2),
}


def save_layout(name: str, folder: Path) -> ModelSource:
    """Random weights in the layout of ``amd/NAME``, with the demo's tokenizer."""
    kind, fields = LAYOUTS[name]
    shutil.copytree(DRAFT, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = AutoConfig.for_model(kind, **SHAPE | {key: fields[key] for key in fields if key == "rope_parameters"})
    randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 3).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | fields))
    if fields is PARD2:
        torch.save({"target_proj.weight": torch.randn(64, 256)}, folder / "warp_model.bin")
    return ModelSource(str(folder), device="cpu", dtype="float32")


class Authors:
    """The draft of ``PardInfer.generate`` in ``pard/pard_infer.py`` of AMD-AGI/PARD, over transformers alone.

    What was kept is read together with K - 1 mask tokens, whose part of the cache is dropped after the pass. The last K
    logits are the draft.
    """

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._mask = AutoConfig.from_pretrained(folder).pard_token
        self._cache = DynamicCache()

    @torch.no_grad()
    def draft(self, kept: Sequence[int], count: int) -> Tensor:
        """Logits [count, vocabulary] after the tokens that were kept since the draft before."""
        inputs = torch.tensor([[*kept, *[self._mask] * (count - 1)]])
        logits = self._model(input_ids=inputs, past_key_values=self._cache, use_cache=True).logits[0, -count:]
        self._cache.crop(1 - count)
        return logits


def rounds(authors: Authors, prompt: Sequence[int], count: int) -> Iterator[tuple[list[int], Tensor]]:
    """All tokens so far, and the authors' logits for the next; a part of each draft is kept, and one other token."""
    tokens, kept = list(prompt), list(prompt)
    for number in range(4):
        logits = authors.draft(kept, count)
        yield tokens, logits
        kept = [*logits[: number * 2, :WIDTH].argmax(-1).tolist(), 1000 + number]
        tokens = [*tokens, *kept]


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_authors_inference(name: str, tmp_path: Path) -> None:
    count, prompt = 12, list(range(40, 61))
    draft, target = save_layout(name, tmp_path / "draft"), save_layout(name, tmp_path / "target")
    seen: list[Tensor] = []

    def record(groups: Sequence[RowGroup], logits: Tensor) -> None:
        seen.append(logits.clone())

    options = BackendOptions(max_model_len=256, num_step_tokens=count, logits_processors=(record,))
    drafter, _ = build_drafter(draft, options, target)
    spec, agreed = SequenceSpec(SamplingParams(temperature=0.0), 0, len(prompt), 200, (0,)), 0
    for tokens, wanted in rounds(Authors(draft.path), prompt, count):
        seen.clear()
        (proposal,) = drafter.propose([DraftJob("a", tokens, spec, agreed, len(prompt), None, 0, count)])
        assert proposal.status is Status.DECIDED
        assert [one.token for one in (proposal, *proposal.further)] == wanted[:, :WIDTH].argmax(-1).tolist()
        torch.testing.assert_close(torch.cat(seen), wanted[:, :WIDTH], rtol=1e-4, atol=1e-4)
        agreed = len(tokens)


def test_what_a_checkpoint_does_not_say_is_taken_from_its_authors_runs(tmp_path: Path) -> None:
    draft, target = (save_layout("PARD2-Qwen3-8B", tmp_path / role) for role in ("draft", "target"))
    pair = describe_pair(target, draft, num_step_tokens=17)
    assert (pair.step_tokens.count, pair.step_tokens.mask_token_id) == (12, MASK)
    long, alone = pair.step_tokens.notes
    assert long.endswith(f"{draft.path} names no para_num; drafts of up to 16 take several passes")
    assert "from tokens alone" in alone
    options = BackendOptions(max_model_len=256, num_step_tokens=17)
    drafter, _ = build_drafter(draft, options, target)
    assert drafter.metrics()["num_step_tokens"] == 12
    tokens = load_tokenizer(target)("import os").input_ids
    spec = SequenceSpec(SamplingParams(temperature=0.0), 0, len(tokens), 200, (0,))
    (proposal,) = drafter.propose([DraftJob("a", tokens, spec, 0, len(tokens), None, 0, 17)])
    assert 1 + len(proposal.further) == 12
