"""Medusa heads: the checkpoints that vLLM reads, and what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from specdec.core.errors import ModelLoadError
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.heads import HeadDrafter, HeadRow, HeadsOptions, load_heads
from specdec.drafting.medusa.heads import HeadsConfig, load
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.drafting.medusa_folders import write_medusa
from tests.specdec.models.families import VOCAB_SIZE, make_model

CONFIG = HeadsConfig(hidden_size=64, vocab_size=VOCAB_SIZE, num_heads=3, num_hidden_layers=2)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return prepare_model(make_model("llama"), "tiny")


def weights_of(config: HeadsConfig, width: int | None = None) -> dict[str, Tensor]:
    """Random weights by vLLM's names."""
    generator = torch.Generator().manual_seed(1)
    size, shapes = config.hidden_size, {}
    for head in range(config.num_heads):
        for layer in range(config.num_hidden_layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (size, size)
            if config.medusa_fc_bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (size,)
        if not config.original_lm_head:
            shapes[f"lm_heads.{head}.weight"] = (width or config.vocab_size, size)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def by_hand(config: HeadsConfig, weights: dict[str, Tensor], hidden: Tensor, vocabulary: list[Tensor]) -> list[Tensor]:
    logits = []
    for head in range(config.num_heads):
        state = hidden
        for layer in range(config.num_hidden_layers):
            name = f"blocks.{head}.layers.{layer}"
            state = state + silu(linear(state, weights[f"{name}.weight"], weights.get(f"{name}.bias")))
        logits.append(linear(state, vocabulary[head]) * config.logit_scale)
    return logits


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, medusa_fc_bias=True, logit_scale=0.5, num_heads=1),
        replace(CONFIG, original_lm_head=True),
    ],
)
def test_logits_are_those_of_the_formula(tmp_path: Path, target: LoadedModel, config: HeadsConfig) -> None:
    weights = weights_of(config)
    heads = load(write_medusa(tmp_path, config, weights), target)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    own = target.model.get_output_embeddings().weight
    vocabulary = [weights.get(f"lm_heads.{head}.weight", own) for head in range(config.num_heads)]
    logits = heads.all_logits(hidden)
    assert logits.shape == (heads.num_tokens, 5, VOCAB_SIZE)
    for got, want in zip(logits, by_hand(config, weights, hidden, vocabulary), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "lm_head.weight"])
def test_a_vocabulary_head_that_all_share_may_be_in_the_file(tmp_path: Path, target: LoadedModel, name: str) -> None:
    config = replace(CONFIG, original_lm_head=True)
    weights = weights_of(config) | {name: torch.randn(VOCAB_SIZE, 64)}
    hidden = torch.randn(2, 64)
    want = by_hand(config, weights, hidden, [weights[name]] * 3)
    torch.testing.assert_close(
        load(write_medusa(tmp_path, config, weights), target).all_logits(hidden), torch.stack(want)
    )


@pytest.mark.parametrize("width", [40, VOCAB_SIZE])
def test_heads_of_a_part_of_the_vocabulary_say_nothing_else(tmp_path: Path, target: LoadedModel, width: int) -> None:
    """The vocabulary heads of the file may be whole; their rows for the listed tokens are taken."""
    config, token_map = replace(CONFIG, truncated_vocab_size=40), torch.arange(3, 123, 3)
    weights = weights_of(config, width)
    heads = load(write_medusa(tmp_path, config, weights | {"token_map": token_map}), target)
    hidden = torch.randn(2, 64)
    kept = [weights[f"lm_heads.{head}.weight"][slice(None) if width == 40 else token_map] for head in range(3)]
    logits = heads.all_logits(hidden)
    torch.testing.assert_close(logits[..., token_map], torch.stack(by_hand(config, weights, hidden, kept)))
    others = [token for token in range(VOCAB_SIZE) if token not in token_map]
    assert (logits[..., others] == float("-inf")).all()


def test_the_first_medusas_names_are_read(tmp_path: Path, target: LoadedModel) -> None:
    weights = {f"medusa_heads.{name}": weight for name, weight in weights_of(CONFIG).items()}
    fields = {name: value for name, value in CONFIG.to_dict().items() if not name.startswith("num_")}
    folder = write_medusa(tmp_path, CONFIG, weights)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"medusa_num_heads": 3, "medusa_num_layers": 2}))
    assert load(folder, target).num_tokens == 3


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, target: LoadedModel) -> None:
    weights = weights_of(CONFIG)

    def refused(config: HeadsConfig, weights: dict[str, Tensor], **fields: object) -> str:
        with pytest.raises(ModelLoadError) as info:
            load(write_medusa(tmp_path, config, weights, **fields), target)
        return str(info.value)

    assert "hidden_size and vocab_size must be 64 and 128, not 32 and 128" in refused(CONFIG, weights, hidden_size=32)
    assert "must be 64 and 128, not 64 and 130" in refused(CONFIG, weights, vocab_size=130)
    short = {name: weight for name, weight in weights.items() if name != "blocks.2.layers.1.weight"}
    assert "lack blocks.2.layers.1.weight" in refused(CONFIG, short)
    assert "token_map must list as many" in refused(replace(CONFIG, truncated_vocab_size=40), weights)
    with pytest.raises(ModelLoadError, match="takes no heads"):
        load_heads(HeadsOptions(str(tmp_path), 3), replace(target, opaque_state=object()))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="lacks 'hidden_size'"):
        load(str(tmp_path), target)
    with pytest.raises(ModelLoadError, match="there is no folder"):
        load("./nowhere", target)


def test_a_connection_that_is_lost_is_said(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object, **__: object) -> str:
        raise httpx2.RemoteProtocolError("Server disconnected")

    monkeypatch.setattr("huggingface_hub.snapshot_download", lose)
    with pytest.raises(ModelLoadError, match="cannot load the heads some/heads: Server disconnected"):
        load("some/heads", target)


def test_heads_run_in_inference_mode_and_draws_do_not(target: LoadedModel) -> None:
    """A sampler keeps memory on its device, which it could not change after such a mode."""
    modes: list[bool] = []

    class Heads:
        num_tokens, hidden_layers, cache_layers, num_bytes = 2, (), (), 0

        def fuse(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
            return states[0]

        def logits(self, features: torch.Tensor, place: int) -> torch.Tensor:
            modes.append(torch.is_inference_mode_enabled())
            return features

    def note(groups: object, logits: torch.Tensor) -> None:
        modes.append(torch.is_inference_mode_enabled())

    runner = ModelRunner(target, num_blocks=1)
    drafter = HeadDrafter(Heads(), runner, Sampler(8, (note,)), 2)
    spec = SequenceSpec(SamplingParams(temperature=0), 0, 1, 8)
    (draft,) = drafter.drafts([torch.eye(8)[[5]]], [HeadRow(runner.new_sequence(), 1, [0], [2], spec, [1, 2], 2)])
    assert draft.tokens == (5, 5)
    assert modes == [True, False, True, False]
