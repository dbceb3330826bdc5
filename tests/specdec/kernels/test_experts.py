"""Experts over all tokens of a pass: what transformers' own give, and bits that no other token changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.core.errors import ModelLoadError
from specdec.executor.runner import ModelRunner
from specdec.kernels import experts
from specdec.models.loading import prepare_model
from specdec.models.parity_check import check_admission, check_bits, no_strict_reason
from tests.specdec.executor.test_tiles import library, whole
from tests.specdec.models.families import make_model

FAMILIES = ("mixtral", "gpt_oss", "qwen2_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_the_models_own(family: str) -> None:
    loaded = prepare_model(make_model(family), family)
    runner = ModelRunner(loaded, num_blocks=150, tile_tokens=16)
    assert loaded.model.config._experts_implementation == experts.TILED_EXPERTS
    check_admission(runner)
    text = list(range(40))
    tiled = whole(runner, text).clone()
    loaded.model.set_experts_implementation("eager")
    assert torch.allclose(whole(runner, text), tiled, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_their_bits_depend_on_no_other_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, lambda num_rows, _: 1 + num_rows % 3)
    loaded = prepare_model(make_model(family).to(torch.bfloat16), family)
    runner = ModelRunner(loaded, num_blocks=150, tile_tokens=16)
    check_bits(runner)
    if family != "mixtral":  # of the others too little goes through the library above
        return
    loaded.model.set_experts_implementation("eager")  # each multiplies the tokens that choose it
    with pytest.raises(ModelLoadError, match=r"bits of \d+ of \d+ tokens depend on the step"):
        check_bits(runner)


def test_experts_of_an_unknown_layout_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = prepare_model(make_model("mixtral"), "mixtral")
    assert no_strict_reason(loaded) == ""
    for module in loaded.model.modules():
        if hasattr(module, "is_transposed"):
            del module.is_transposed
    reason = no_strict_reason(replace(loaded))
    assert reason == "its experts (MixtralExperts) multiply as many tokens as choose them"
