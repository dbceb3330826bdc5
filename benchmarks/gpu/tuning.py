"""Times of the attention kernel with other tiles, warps, stages and segments, beside what its table has.

All of these but the last two are part of what the numbers are. So nothing is chosen here: a better entry is for the
table, for every GPU, if it compiles without spills for all (``tests/thorough/kernels``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.attention import Sizes, make_inputs, make_shape, make_step
from benchmarks.gpu.device import seconds
from benchmarks.gpu.report import MissingError, Report
from specdec.kernels.segmented import AttentionLayer, AttentionShape

if TYPE_CHECKING:
    from specdec.kernels.triton.attention import TileConfig

FULL = Sizes(
    {"8b": (32, 8, 128), "1b": (32, 8, 64)},
    (),
    ((1, 1, 1024), (1, 8, 1024), (64, 1, 1024), (64, 8, 1024), (1, 8, 8192), (64, 1, 8192), (64, 8, 8192)),
)
SMALL = Sizes({"tiny": (2, 1, 16)}, (), ((1, 1, 8),))
_NUM_SHOWN = 3
_NEEDED_S = 12.0


@dataclass(frozen=True)
class Variant:
    """A way to run the kernel.

    Attributes:
        config: The tile.
        segment_length: Keys of the first segments.
        split_below: Tiles times key heads below which tiles are split; None as ever.
    """

    config: TileConfig
    segment_length: int
    split_below: int | None = None


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Print, for each step, the time of the table's entry over that of the best variant, and the best ones' names."""
    try:
        from specdec.kernels.triton.attention import tile_config
    except ImportError as error:
        raise MissingError(f"Triton: {error}") from None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, heads in sizes.shapes.items():
        for num_rows, count, before in sizes.timed:
            if not report.has_time(_NEEDED_S, f"{name}, {num_rows}x{count} after {before}"):
                break
            rows = [(before, count)] * num_rows
            shape = make_shape(heads, rows, dtype)
            table = Variant(tile_config(shape), shape.segment_length)
            spent_us = dict(_times(report, device, shape, rows, table))
            if "table" not in spent_us:
                continue
            best = sorted(spent_us, key=spent_us.__getitem__)
            step = f"tuning_{name}_{num_rows}x{count}_at_{before}"
            report.figure(f"{step}_us", spent_us["table"], over=spent_us[best[0]])
            report.say("; ".join(f"{one}: {spent_us[one]:.1f}" for one in best[:_NUM_SHOWN]))


def variants(table: Variant) -> dict[str, Variant]:
    """By name, the table's entry and what is tried in its place."""
    tried = {"table": table}
    for keys, warps, stages in product((32, 64), (4, 8), (2, 4, 5)):
        config = replace(table.config, keys=keys, num_warps=warps, num_stages=stages)
        if config != table.config:
            tried[f"{keys} keys, {warps} warps, {stages} stages"] = replace(table, config=config)
    for length in (128, 512):
        tried[f"segments of {length}"] = replace(table, segment_length=length)
    tried["never split"] = replace(table, split_below=0)
    tried["always split"] = replace(table, split_below=2**30)
    return tried


def _times(
    report: Report, device: torch.device, shape: AttentionShape, rows: list[tuple[int, int]], table: Variant
) -> Iterator[tuple[str, float]]:
    """Microseconds of each variant that compiles."""
    from specdec.kernels.triton.attention import TritonAttention

    step = make_step(rows, shape.block_size, device)
    inputs = make_inputs(shape, step, device)
    layer = AttentionLayer(shape.head_dim**-0.5)
    for name, one in variants(table).items():
        of_length = replace(shape, segment_length=one.segment_length)
        try:
            kernel = TritonAttention(of_length, device, one.config, split_below=one.split_below)
            kernel.prepare(step)
            spent_s = seconds(partial(kernel.attend, *inputs, layer), device)
        except Exception as error:  # of the compiler: for example too little shared memory
            report.say(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
        else:
            yield name, spent_s * 1e6
