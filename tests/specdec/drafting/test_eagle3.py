"""EAGLE-3 heads: both layouts are read alike, what is no such head is refused by name, and they draft."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from specdec.core.errors import ModelLoadError
from specdec.core.params import SamplingParams
from specdec.drafting.eagle3.heads import Eagle3Heads, load
from specdec.drafting.heads import HeadDrafter, with_heads
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.models.loading import LoadedModel, prepare_model
from specdec.sampling.pipeline import Sampler
from tests.sizes import one_of_each
from tests.specdec.drafting.eagle3_folders import write_eagle3
from tests.specdec.engine.pairs import MAX_MODEL_LEN, greedy, make_model, run
from tests.specdec.models.families import VOCAB_SIZE
from tests.specdec.models.recurrent_families import make_recurrent
from tests.thorough.engine.test_recurrent import make_cases, make_runner

LENGTHS = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return prepare_model(make_model("llama"), "tiny")


@lru_cache
def said(family: str) -> list[list[int]]:
    """What a model says."""
    model = model_of(family)
    return [[*case.prompt, *greedy(model, replace(case, max_tokens=60, eos_token_ids=(0,)))] for case in make_cases()]


def model_of(family: str) -> PreTrainedModel:
    return make_model(family) if family == "llama" else make_recurrent(family)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return said("llama")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_both_layouts_are_read_alike(kind: str, tmp_path: Path, target: LoadedModel, texts: list[list[int]]) -> None:
    made: list[dict[str, Any]] = []
    for layout in ("speculators", "authors"):
        folder = write_eagle3(tmp_path / layout, make_model("llama"), texts, kind, layout, draft_vocab_size=50)
        heads = load(folder, target)
        count = target.config.num_hidden_layers
        assert heads.hidden_layers == (0, 1, count)
        assert [layer.bytes_per_token for layer in heads.cache_layers] == [2 * 2 * 16 * 4]
        assert heads.cache_layers[0].index > count
        states = [torch.randn(3, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        logits = heads.logits(heads.fuse(states), 0)
        assert logits.shape == (3, VOCAB_SIZE)
        assert logits.isfinite().sum() == 3 * 50
        made.append({"logits": logits, **{name: w for name, w in heads.state_dict().items() if "embed" not in name}})
    assert made[0].keys() == made[1].keys()
    for name, weight in made[0].items():
        torch.testing.assert_close(made[1][name], weight, rtol=1e-4, atol=1e-4)


def serve(folder: Path, family: str, tree: int = 0, num_blocks: int = 300, **written: Any) -> InProcessService:
    """A target with a fitted head that drafts four tokens in a row."""
    path = write_eagle3(folder, model_of(family), said(family), draft_vocab_size=100, **written)
    model = model_of(family)
    heads = load(path, prepare_model(model, "tiny"))
    runner, sampler = make_runner(model, heads=heads, num_blocks=num_blocks), Sampler(VOCAB_SIZE)
    drafter = HeadDrafter(heads, runner, sampler, 4, tree)
    return InProcessService(ModelTarget(runner, sampler, **LENGTHS, heads=drafter), None, 0)


@pytest.mark.parametrize(
    ("model", "temperature"), one_of_each([("llama", 0), ("llama", 12), ("qwen3_5", 12)], [0.0, 1.0])
)
def test_they_draft_and_no_token_changes(model: tuple[str, int], temperature: float, tmp_path: Path) -> None:
    """Hybrid targets take chains."""
    family, tree = model
    service = serve(tmp_path, family, tree, layout="authors", num_blocks=36)
    cases = [
        replace(case, max_tokens=50, eos_token_ids=()) for case in make_cases(SamplingParams(temperature=temperature))
    ]
    wanted, _ = run(service, [replace(case, num_speculative_tokens=0) for case in cases])
    for _ in range(2):
        outputs, stats = run(service, cases)
        assert outputs == wanted
        assert stats.num_accepted_tokens > 8, stats
        assert stats.num_draft_tokens <= (12 if family == "llama" and tree else 4) * stats.num_drafts
    metrics = service.target._backend.metrics()
    assert metrics["num_reused_tokens"] > 0
    assert family != "llama" or metrics["num_evictions"] > 0


@pytest.mark.parametrize("tree", [0, 12])
def test_greedy_output_is_that_of_transformers(tree: int, tmp_path: Path) -> None:
    cases = make_cases(SamplingParams(temperature=0.0))
    outputs, stats = run(serve(tmp_path, "llama", tree, kind="qwen3"), cases)
    assert outputs == [greedy(make_model("llama"), case) for case in cases]
    assert stats.num_accepted_tokens > 5


def refused(folder: Path, target: LoadedModel, **fields: Any) -> str:
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (written | fields).items() if v is not None}))
    with pytest.raises(ModelLoadError) as info:
        load(str(folder), target)
    (folder / "config.json").write_text(json.dumps(written))
    return str(info.value)


def test_what_is_no_such_head_is_refused_by_name(tmp_path: Path, target: LoadedModel, texts: list[list[int]]) -> None:
    folder = Path(write_eagle3(tmp_path / "head", make_model("llama"), texts, draft_vocab_size=50))
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert "it is a drafter of the kind dflash" in refused(folder, target, speculators_model_type="dflash")
    assert "lacks 'draft_vocab_size'" in refused(folder, target, draft_vocab_size=None)
    assert "its layers are gemma2's" in refused(
        folder, target, transformer_layer_config=layer | {"model_type": "gemma2"}
    )
    assert "must be 64 and 128, not 64 and 130" in refused(
        folder, target, transformer_layer_config=layer | {"vocab_size": 130}
    )
    assert "must be 64 and 128, not 32 and 128" in refused(folder, target, target_hidden_size=32)
    assert "d2t must map 40 tokens to as many" in refused(folder, target, draft_vocab_size=40)
    weights = load_file(folder / "model.safetensors")
    for change, reason in (
        ({"d2t": weights["d2t"] + 100}, r"d2t must map to tokens in [0, 128)"),
        ({"d2t": weights["d2t"] * 0 - torch.arange(50)}, "d2t must map 50 tokens to as many"),
        ({"fc.weight": weights["fc.weight"][:, 1:].contiguous()}, "lack fc.weight"),
    ):
        save_file(weights | change, folder / "model.safetensors")
        assert reason in refused(folder, target)
    save_file({name: w for name, w in weights.items() if name not in ("d2t", "t2d")}, folder / "model.safetensors")
    assert "knows 50 tokens of 128, and has no d2t" in refused(folder, target)
    save_file(weights, folder / "model.safetensors")
    deep = replace(load(str(folder), target).config, eagle_aux_hidden_state_layer_ids=(99,))
    with pytest.raises(ModelLoadError, match="does not go with its heads"):
        with_heads(target, Eagle3Heads(deep, deep.layers_read(4), 9))


def test_what_its_authors_read_is_read_where_nothing_is_said(tmp_path: Path, texts: list[list[int]]) -> None:
    target = prepare_model(make_model("llama"), "tiny")
    folder = Path(write_eagle3(tmp_path / "head", make_model("llama"), texts))
    fields = json.loads((folder / "config.json").read_text())
    del fields["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(fields))
    count = target.config.num_hidden_layers
    assert load(str(folder), target).hidden_layers == (2, count // 2, count - 3)
