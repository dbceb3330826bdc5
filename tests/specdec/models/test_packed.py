"""Packed linear layers: the results of plain ones, and what is left alone."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from specdec.models import packed
from specdec.models.loading import prepare_model
from specdec.models.packed import PackedLinear, PackedProduct, pack_linear_layers
from specdec.models.runner import ModelRunner, RowInput
from tests.specdec.models.families import FAMILIES, make_model
from tests.specdec.models.recurrent_families import RECURRENT, make_recurrent

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU has no bfloat16",
)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To the last bits of bfloat16: which way a result is rounded is the CPU's and its kernels' affair."""
    torch.testing.assert_close(found, expected, rtol=0.016, atol=1e-3)


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
@pytest.mark.parametrize(("width", "height"), [(256, 768), (768, 256), (160, 4096)])
def test_results_and_weights_are_the_plain_layers(width, height, has_bias):
    plain = nn.Linear(width, height, bias=has_bias, dtype=torch.bfloat16)
    with torch.inference_mode():
        twin = PackedLinear(plain)
        assert torch.equal(twin.weight, plain.weight)
        for num_rows in (0, 1, 2, 6, 9, 17, 130):
            inputs = torch.randn(1, num_rows, width).bfloat16()
            assert_close(twin(inputs), plain(inputs))


def test_odd_widths_differ_by_rounding_at_most():
    plain = nn.Linear(33, 7, dtype=torch.bfloat16)
    with torch.inference_mode():
        twin = PackedLinear(plain)
        assert torch.equal(twin.weight, plain.weight)
        for num_rows in (1, 6, 130):
            inputs = torch.randn(1, num_rows, 33).bfloat16()
            assert_close(twin(inputs), plain(inputs))


def test_shared_weights_stay():
    model, twin = Tied(torch.bfloat16), Tied(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    assert pack_linear_layers(model) == 2
    assert [type(block[0]) for block in model.blocks] == [PackedLinear, PackedLinear]
    assert type(model.head) is nn.Linear
    with torch.inference_mode():
        tokens = torch.arange(48)[None]
        assert_close(model(tokens), twin(tokens))


class Gated(nn.Module):
    """Two layers that read the same inputs."""

    def __init__(self, *, has_bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=has_bias, dtype=torch.bfloat16)
        self.up_proj = nn.Linear(64, 96, bias=has_bias, dtype=torch.bfloat16)


def products_of(model: nn.Module) -> set[PackedProduct]:
    return {module.product for module in model.modules() if isinstance(module, PackedLinear)}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("width", "heights"), [(256, (256, 64, 64)), (96, (64, 32)), (2048, (1024, 1024))])
def test_layers_multiplied_together_give_what_each_gives(width, heights, has_bias):
    plain = [nn.Linear(width, height, bias=has_bias, dtype=torch.bfloat16) for height in heights]
    with torch.inference_mode():
        product = PackedProduct(plain)
        twins = [PackedLinear(linear, product, index) for index, linear in enumerate(plain)]
        for num_rows in (0, 1, 2, 6, 9, 17, 130):
            inputs = torch.randn(1, num_rows, width).bfloat16()
            for twin, linear in zip(twins, plain, strict=True):
                assert_close(twin(inputs), linear(inputs))
        for twin, linear in zip(twins, plain, strict=True):
            assert torch.equal(twin.weight, linear.weight)


def test_one_product_serves_both_layers_and_then_holds_nothing():
    gated = Gated()
    pack_linear_layers(gated)
    (product,) = products_of(gated)
    inputs = torch.randn(1, 4, 64).bfloat16()
    with torch.inference_mode():
        gate = gated.gate_proj(inputs)
        product.packed = None  # nothing is multiplied from here on
        up = gated.up_proj(inputs)
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    results = weakref.ref(gate), weakref.ref(inputs)
    del gate, up, inputs
    assert [result() for result in results] == [None, None]


def test_a_part_that_nobody_takes_goes_with_the_inputs():
    """As where queries and keys are of different inputs, or a forward pass fails half-way."""
    gated = Gated()
    pack_linear_layers(gated)
    (product,) = products_of(gated)
    with torch.inference_mode():
        for _ in range(2):
            for name in ("gate_proj", "up_proj"):
                inputs = torch.randn(1, 4, 64).bfloat16()
                getattr(gated, name)(inputs)
        assert product._parts
        del inputs
    assert not product._parts


def test_layers_called_alone_or_with_other_inputs_are_right():
    gated = Gated(has_bias=True)
    plain = copy.deepcopy(gated)
    pack_linear_layers(gated)
    first, second = (torch.randn(1, 4, 64).bfloat16() for _ in range(2))
    with torch.inference_mode():
        for name, inputs in (
            ("gate_proj", first),
            ("up_proj", second),
            ("gate_proj", first),
            ("gate_proj", first),
            ("up_proj", first),
            ("up_proj", second),
        ):
            assert_close(getattr(gated, name)(inputs), getattr(plain, name)(inputs))


def test_unlike_siblings_are_multiplied_alone():
    gated = Gated()
    gated.up_proj = nn.Linear(64, 96, bias=True, dtype=torch.bfloat16)
    assert pack_linear_layers(gated) == 2
    assert len(products_of(gated)) == 2


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_every_family_computes_what_it_computes_with_one_product_a_layer(family, monkeypatch):
    model = (make_model if family in FAMILIES else make_recurrent)(family).bfloat16()
    twin = copy.deepcopy(model)
    together = logits_of(model)
    monkeypatch.setattr(packed, "SIBLINGS", ())
    alone = logits_of(twin)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.1)
    assert not any(product._parts for product in products_of(model)), "a result that nobody took"


def logits_of(model: nn.Module) -> list[torch.Tensor]:
    """Two prompts, a step with both, and one more of the first."""
    runner = ModelRunner(prepare_model(model, "tiny"), num_blocks=30)
    one, other = runner.new_sequence(), runner.new_sequence()
    assert runner.reserve(one, 90)
    assert runner.reserve(other, 90)
    steps = (
        [RowInput(one, list(range(3, 40)), 1)],
        [RowInput(other, list(range(5, 15)), 1)],
        [RowInput(one, [3, 4, 5, 6], 4), RowInput(other, [7], 1)],
        [RowInput(one, [3], 1)],
    )
    return [runner.forward(rows) for rows in steps]


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

    class Watched(PackedProduct):
        def __init__(self, linears: list[nn.Linear]) -> None:
            seen.append(sum(weight() is not None for weight in plain))
            super().__init__(linears)

    monkeypatch.setattr(packed, "PackedProduct", Watched)
    pack_linear_layers(model)
    assert seen == [2, 1]
