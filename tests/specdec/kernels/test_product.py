"""Products that split no sum: what the library's give, and one row's bits beside any number of others."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.sizes import some
from tests.specdec.kernels.interpreter import interpreted

SIZES = (1, 2, 3, 8, 16, 17, 63, 64, 65, 128, 300, 512)


def operands(dtype: torch.dtype, num_columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(512, depth).to(dtype),
        torch.randn(num_columns, depth).to(dtype),
        torch.randn(num_columns).to(dtype),
    )


@pytest.mark.parametrize(("dtype", "num_columns", "depth"), [("float16", 40, 96), ("float32", 20, 70)])
@interpreted
def test_a_row_has_the_same_bits_alone_and_among_512(dtype: str, num_columns: int, depth: int) -> None:
    from specdec.kernels.triton.product import product

    inputs, weight, bias = operands(getattr(torch, dtype), num_columns, depth)
    for own in (None, bias):
        whole = product(inputs, weight, own)
        exact = functional.linear(inputs.double(), weight.double(), None if own is None else own.double())
        assert torch.allclose(
            whole.double(), exact, rtol=1e-3 if dtype == "float16" else 1e-5, atol=1e-4
        )  # of sums around 14
        for size in some(SIZES, 4):
            start = 512 - size
            assert torch.equal(product(inputs[start:], weight, own), whole[start:]), size
            assert torch.equal(product(inputs[None, :size], weight, own)[0], whole[:size]), size


@interpreted
def test_rows_may_lie_apart_and_weights_may_not() -> None:
    from specdec.kernels.triton.product import product

    inputs, weight, _ = operands(torch.float32, 16, 64)
    apart = torch.randn(64, 512).T
    assert torch.equal(product(apart, weight), product(apart.contiguous(), weight))
    with pytest.raises(ValueError, match="without gaps"):
        product(inputs, torch.randn(64, 16).T)
