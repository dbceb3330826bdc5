"""Tiny models, their twins with transformers' own attention, and the whole forward that everything is compared with."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from specdec.models.loading import LoadedModel, prepare_model
from tests.specdec.models.families import make_model


@pytest.fixture(scope="session")
def models() -> Callable[[str], tuple[LoadedModel, PreTrainedModel]]:
    """Give a family's model as loaded, and a twin with the same weights and transformers' own attention."""
    made: dict[str, tuple[LoadedModel, PreTrainedModel]] = {}

    def get(family: str) -> tuple[LoadedModel, PreTrainedModel]:
        if family not in made:
            stock = make_model(family)
            stock.set_attn_implementation("eager")
            made[family] = (prepare_model(make_model(family), family), stock)
        return made[family]

    return get


@pytest.fixture(scope="session")
def whole_forward() -> Callable[[PreTrainedModel, list[int]], torch.Tensor]:
    """Logits of all positions of one row, from one forward without a cache: float32 [length, vocabulary]."""

    @torch.inference_mode()
    def forward(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()

    return forward
