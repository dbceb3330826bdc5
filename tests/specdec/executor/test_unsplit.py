"""Whole steps whose products split nothing: the library where that was shown, our kernel else, and the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from cluster.models.demos import demo_folder
from specdec.core.errors import ModelLoadError
from specdec.engine import build
from specdec.engine.build import BackendOptions, build_target
from specdec.executor import unsplit
from specdec.executor.runner import ModelRunner
from specdec.executor.unsplit import UnsplitLinear, no_unsplit_reason, use_unsplit_products
from specdec.models.loading import LoadedModel, ModelSource, prepare_model
from tests.specdec.executor.test_tiles import by_count, in_pieces, library, whole
from tests.specdec.kernels.interpreter import interpreted
from tests.specdec.models.families import randomize
from tests.specdec.models.recurrent_families import make_recurrent

VOCAB = 60
SHAPES = ("64x64", "32x64", "96x64", "64x96", "60x64")
DEMO = ModelSource(str(demo_folder("target")), dtype="float32", device="cpu")
TEXTS = [[(7 * length + 11 * i) % VOCAB for i in range(length)] for length in (12, 17)]


def tiny(dtype: torch.dtype = torch.float16) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attention_bias=True,
    )
    return prepare_model(randomize(LlamaForCausalLM(config), 0).to(dtype), "tiny")


def num_different(loaded: LoadedModel, kernel: str = "triton") -> int:
    """Of the positions of all texts those whose logits have other bits than alone, read at once."""
    make = lambda: ModelRunner(loaded, num_blocks=30, kernel=kernel, tile_tokens=0)  # noqa: E731
    alone = [whole(make(), text) for text in TEXTS]
    beside = in_pieces(make(), TEXTS, (9, 4), 3)
    return sum(int((a != b).any(1).sum()) for a, b in zip(alone, beside, strict=True))


@interpreted
def test_bits_depend_on_no_step_with_a_library_that_splits_where_rows_are_few() -> None:
    with pytest.MonkeyPatch.context() as patch:
        library(patch, by_count)
        loaded = tiny()
        assert num_different(loaded, "gather") > 0
        found = use_unsplit_products(loaded, (), Path("/nowhere"))
        assert num_different(loaded) == 0
    assert found == {f"{shape} float16{' with bias' * (i < 2)}": [] for i, shape in enumerate(SHAPES)}
    runner = ModelRunner(loaded, num_blocks=30, kernel="triton", tile_tokens=0)
    assert runner.is_strict
    assert not runner.takes_trees


@interpreted
def test_the_library_is_used_at_sizes_where_it_splits_nothing() -> None:
    from specdec.kernels.triton.product import product

    def splits_few(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        sizes.append(inputs.numel() // inputs.shape[-1])
        return product(inputs, weight, bias) if sizes[-1] >= 16 else inputs @ weight.T + 1

    sizes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", splits_few)
        loaded = tiny()
        found = use_unsplit_products(loaded, (4, 17), Path("/nowhere"))
        assert set(map(tuple, found.values())) == {(17,)}
        sizes.clear()
        assert num_different(loaded) == 0
        assert set(sizes) == {17}, "at others it was not looked at"


def test_what_was_shown_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def equal(linear: torch.nn.Linear, sizes: list[int]) -> dict[str, bool]:
        asked.append(sizes)
        return {str(size): size > 16 for size in sizes}

    monkeypatch.setattr(unsplit, "equal_sizes", equal)
    first = use_unsplit_products(tiny(), (16, 32), tmp_path)
    assert asked == [[16, 32]] * 5, "each shape once"
    asked.clear()
    assert use_unsplit_products(tiny(), (16, 32), tmp_path) == first
    assert asked == []
    assert use_unsplit_products(tiny(), (32, 64), tmp_path)["60x64 float16"] == [32, 64]
    assert asked == [[64]] * 5
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("products-cpu-torch-")
    assert json.loads(file.read_text())["60x64 float16"] == {"16": False, "32": True, "64": True}
    for broken in ("{", "[]"):
        file.write_text(broken)
        assert use_unsplit_products(tiny(), (16, 32), tmp_path) == first, "a file that is broken says nothing"


def test_without_a_gpu_they_are_refused() -> None:
    assert no_unsplit_reason(tiny()) == "whole steps (strict_tile_tokens: 0) need a CUDA GPU, not cpu"
    with pytest.raises(ModelLoadError, match=r"strict is not possible with .*: whole steps"):
        build_target(DEMO, BackendOptions(strict_tile_tokens=0))


def test_steps_that_are_not_recorded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "no_unsplit_reason", lambda _: "")
    with pytest.raises(ModelLoadError, match="strict_tile_tokens: 0 needs recorded steps: set executor: graphs"):
        build_target(DEMO, BackendOptions(strict_tile_tokens=0))


def test_other_products_are_named() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2)
    others = {
        "a Conv1D": prepare_model(GPT2LMHeadModel(config), "gpt2"),
        "recurrent layers": prepare_model(make_recurrent("qwen3_next"), "hybrid"),
    }
    for what, loaded in others.items():
        assert what in unsplit._other_products(loaded)
    loaded = tiny()
    assert unsplit._other_products(loaded) == ""
    use_unsplit_products(loaded, (), Path("/nowhere"))
    assert unsplit._other_products(loaded) == ""
    assert {type(m) for m in loaded.model.modules() if isinstance(m, torch.nn.Linear)} == {UnsplitLinear}
