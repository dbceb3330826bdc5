"""Packed linear layers: the results of plain ones, and what is left alone."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from specdec.models import packed
from specdec.models.packed import PackedLinear, pack_linear_layers

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU has no bfloat16",
)


class Tied(nn.Module):
    """An embedding whose weight the head shares, with a layer of each kind between."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32, dtype=dtype), nn.SiLU()) for _ in range(2))
        self.head = nn.Linear(32, 48, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("width", "height"), [(256, 768), (768, 256), (33, 7), (160, 4096)])
def test_results_and_weights_are_the_plain_layers(width, height, has_bias):
    plain = nn.Linear(width, height, bias=has_bias, dtype=torch.bfloat16)
    with torch.inference_mode():
        twin = PackedLinear(plain)
        assert torch.equal(twin.weight, plain.weight)
        for num_rows in (0, 1, 2, 6, 9, 17, 130):
            inputs = torch.randn(1, num_rows, width).bfloat16()
            assert torch.equal(twin(inputs), plain(inputs)), num_rows


def test_shared_weights_stay():
    model, twin = Tied(torch.bfloat16), Tied(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    assert pack_linear_layers(model) == 2
    assert [type(block[0]) for block in model.blocks] == [PackedLinear, PackedLinear]
    assert type(model.head) is nn.Linear
    with torch.inference_mode():
        tokens = torch.arange(48)[None]
        assert torch.equal(model(tokens), twin(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_stay(dtype):
    assert pack_linear_layers(Tied(dtype)) == 0


def test_layers_with_hooks_stay():
    model = Tied(torch.bfloat16)
    model.blocks[0][0]._hf_hook = object()
    assert pack_linear_layers(model) == 1


def test_no_more_than_one_weight_is_held_twice(monkeypatch):
    model, seen = Tied(torch.bfloat16), []
    plain = [weakref.ref(block[0].weight) for block in model.blocks]

    class Watched(PackedLinear):
        def __init__(self, linear: nn.Linear) -> None:
            seen.append(sum(weight() is not None for weight in plain))
            super().__init__(linear)

    monkeypatch.setattr(packed, "PackedLinear", Watched)
    pack_linear_layers(model)
    assert seen == [2, 1]
