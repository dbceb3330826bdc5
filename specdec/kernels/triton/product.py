"""Products of linear layers whose sums run over all of their inputs in one loop: no split, whatever the number of rows.

So a row's output has the same bits beside any others. A tile's size follows from the weight's shape alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
_FEW_COLUMNS = 8192
"""Up to so many columns tiles are narrow, so that every processor has one."""


@triton.jit(do_not_specialize=["num_rows"])  # one version for every step
def _multiply(
    inputs, weight, bias, output, num_rows, num_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < num_columns
    inputs += row.to(tl.int64)[:, None] * depth
    weight += column.to(tl.int64)[None, :] * depth
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left = tl.load(inputs + k[None, :], mask=is_row[:, None] & (k < depth)[None, :], other=0.0)
        right = tl.load(weight + k[:, None], mask=is_column[None, :] & (k < depth)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    to = output + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(to, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What ``torch.nn.functional.linear`` gives: [.., K], [N, K] and [N] -> [.., N].

    Args:
        inputs: float32, float16 or bfloat16.
        weight: Of the same type, its rows without gaps.
        bias: Likewise; added before the sum is rounded.
    """
    num_columns, depth = weight.shape
    if weight.stride() != (depth, 1):
        raise ValueError(f"weight must lie row by row without gaps, its strides are {weight.stride()}")
    rows = inputs.reshape(-1, depth).contiguous()
    output = rows.new_empty(len(rows), num_columns)
    columns, stages = (32 if num_columns <= _FEW_COLUMNS else 64), 4
    deep = 64 if inputs.dtype != torch.float32 else 32
    grid = (triton.cdiv(len(rows), _ROWS), triton.cdiv(num_columns, columns))
    _multiply[grid](
        rows, weight, weight if bias is None else bias, output, len(rows), num_columns, depth,
        ROWS=_ROWS, COLUMNS=columns, DEPTH=deep, HAS_BIAS=bias is not None, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return output.view(*inputs.shape[:-1], num_columns)
