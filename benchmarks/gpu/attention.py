"""Attention over the paged cache: bits that depend on the token alone, errors, and times over reading the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.device import read_bandwidth, seconds
from benchmarks.gpu.report import MissingError, Report
from specdec.kernels.segmented import (
    NO_TREE,
    AttentionLayer,
    AttentionShape,
    AttentionStep,
    ReferenceAttention,
    attention_kernel,
)

BLOCK_SIZE = 16
MOST_ERROR = 0.03
"""Of bfloat16 outputs whose values are of a standard normal distribution."""

_NUM_WRITTEN = 64
_NEEDED_S = 5.0


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        shapes: By name: heads, key heads, head dimension.
        exact_rows: Positions before the step and tokens of it, of each row whose bits are compared.
        timed: Rows, tokens a row, positions before them.
    """

    shapes: dict[str, tuple[int, int, int]]
    exact_rows: tuple[tuple[int, int], ...]
    timed: tuple[tuple[int, int, int], ...]


FULL = Sizes(
    {"8b": (32, 8, 128), "1b": (32, 8, 64)},
    ((1000, 8), (8190, 1), (300, 3), (0, 16), (5000, 64)),
    ((1, 1, 1024), (1, 8, 1024), (64, 1, 1024), (64, 8, 1024), (1, 8, 8192), (16, 8, 8192), (64, 8, 8192)),
)
SMALL = Sizes({"tiny": (4, 2, 16)}, ((40, 3), (0, 2), (530, 1)), ())


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Check and time the Triton kernel in the shapes of a target and a draft."""
    try:
        make_kernel = attention_kernel("triton")
    except ValueError as error:
        raise MissingError(str(error)) from None
    for name, heads in sizes.shapes.items():
        _check(report, device, name, heads, sizes.exact_rows)
        _check_cache_write(report, device, name, heads)
        for num_rows, count, before in sizes.timed:
            rows = [(before, count)] * num_rows
            shape = make_shape(heads, rows, torch.bfloat16)
            kernel = make_kernel(shape, device)
            step = make_step(rows, shape.block_size, device)
            kernel.prepare(step)
            attend = partial(kernel.attend, *make_inputs(shape, step, device), AttentionLayer(shape.head_dim**-0.5))
            cache_bytes = num_rows * (before + count) * heads[1] * heads[2] * 2 * shape.dtype.itemsize
            least_us = cache_bytes / read_bandwidth(device) * 1e6
            spent_us = seconds(attend, device) * 1e6
            report.figure(f"attention_{name}_{num_rows}x{count}_at_{before}_us", spent_us, over=least_us)
            prepare_us = seconds(partial(kernel.prepare, step), device) * 1e6
            report.figures[f"attention_{name}_{num_rows}x{count}_at_{before}_prepare_us"] = prepare_us
            if not report.has_time(_NEEDED_S, f"attention {name} after {num_rows}x{count} at {before}"):
                break


def _check(
    report: Report,
    device: torch.device,
    name: str,
    heads: tuple[int, int, int],
    rows: Sequence[tuple[int, int]],
) -> None:
    """Errors against the reference in float32, and the same bits for a token in any company."""
    from specdec.kernels.triton.attention import TritonAttention

    shape = make_shape(heads, rows, torch.bfloat16 if device.type == "cuda" else torch.float32)
    step = make_step(rows, shape.block_size, device)
    queries, keys, values = make_inputs(shape, step, device)
    layer = AttentionLayer(shape.head_dim**-0.5)

    def attended(step: AttentionStep, queries: Tensor, **options: int) -> Tensor:
        kernel = TritonAttention(shape, device, **options)
        kernel.prepare(step)
        return kernel.attend(queries, keys, values, layer)

    out = attended(step, queries)
    reference = ReferenceAttention(replace(shape, dtype=torch.float32), device)
    reference.prepare(step)
    exact = reference.attend(queries.float(), keys.float(), values.float(), layer)
    error = (out.float() - exact).abs().max().item()
    report.check(f"attention {name}: errors of at most {MOST_ERROR}", error <= MOST_ERROR, f"{error:.2g}")
    whole = attended(step, queries, split_below=0)
    report.check(f"attention {name}: split or whole, the same bits", torch.equal(out, whole))
    same, end = True, 0
    for row, (before, count) in enumerate(rows):
        end += count
        alone = make_step([(before + count - 1, 1)], shape.block_size, device)
        alone = replace(alone, block_table=step.block_table[row : row + 1])
        same &= torch.equal(attended(alone, queries[end - 1 : end]), out[end - 1 : end])
    report.check(f"attention {name}: a token alone or beside others, the same bits", same)


def _check_cache_write(report: Report, device: torch.device, name: str, heads: tuple[int, int, int]) -> None:
    """A layer's keys and values in their slots, and how long that takes."""
    from specdec.kernels.triton.attention import write_cache

    _, kv_heads, dim = heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    keys, values = torch.randn(2, kv_heads, _NUM_WRITTEN, dim, device=device).to(dtype).transpose(1, 2)
    slots = torch.randperm(4 * _NUM_WRITTEN, generator=torch.Generator().manual_seed(1))[:_NUM_WRITTEN].to(device)
    pools = torch.zeros(2, 4 * _NUM_WRITTEN // BLOCK_SIZE, BLOCK_SIZE, kv_heads, dim, dtype=dtype, device=device)
    expected = torch.zeros_like(pools)
    expected.flatten(1, 2)[:, slots] = torch.stack((keys, values))
    write = partial(write_cache, keys, values, pools[0], pools[1], slots)
    write()
    report.check(f"cache write {name}: every token in its slot", torch.equal(pools, expected))
    report.figure(f"cache_write_{name}_{_NUM_WRITTEN}_us", seconds(write, device) * 1e6)


def make_step(rows: Sequence[tuple[int, int]], block_size: int, device: torch.device) -> AttentionStep:
    """A step of rows of (positions before it, tokens of it), each with blocks of its own, in no order.

    Args:
        rows: Of the step.
        block_size: Positions of a block.
        device: Where its tensors are.
    """
    counts = torch.tensor([count for _, count in rows])
    starts = counts.cumsum(0) - counts
    row = torch.arange(len(rows)).repeat_interleave(counts)
    before = torch.tensor([before for before, _ in rows])
    place = before[row] + torch.arange(int(counts.sum())) - starts[row]
    width = -(-max(before + count for before, count in rows) // block_size)
    table = torch.randperm(len(rows) * width, generator=torch.Generator().manual_seed(1)).view(len(rows), width)

    def int32(values: Tensor) -> Tensor:
        return values.to(device, torch.int32)

    return AttentionStep(
        block_table=int32(table),
        row=int32(row),
        place=int32(place),
        position=int32(place),
        tree_first=int32(torch.full_like(place, NO_TREE)),
        tree_word=torch.zeros_like(place).to(device),
        span_row=int32(torch.arange(len(rows))),
        span_start=int32(starts),
        span_count=int32(counts),
    )


def make_shape(heads: tuple[int, int, int], rows: Sequence[tuple[int, int]], dtype: torch.dtype) -> AttentionShape:
    """The shape for a step of these rows.

    Args:
        heads: Heads, key heads, head dimension.
        rows: Positions before the step and tokens of it.
        dtype: Of queries, keys and values.
    """
    num_heads, num_kv_heads, head_dim = heads
    num_tokens, longest = sum(count for _, count in rows), max(before + count for before, count in rows)
    sizes = num_heads, num_kv_heads, head_dim, head_dim, dtype, BLOCK_SIZE
    return AttentionShape(*sizes, max_tokens=num_tokens, max_rows=len(rows), max_length=longest)


def make_inputs(shape: AttentionShape, step: AttentionStep, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, and pools of keys and of values."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator, dtype=shape.dtype)

    size = step.block_table.numel(), shape.block_size, shape.num_kv_heads, shape.head_dim
    return normal(len(step.row), shape.num_heads, shape.head_dim), normal(*size), normal(*size)
