"""Layers that cache a latent per position and attend over keys and values which they make of it (MLA).

What such a layer gets back from the cache it expands as a whole; so it gets the blocks of the step's own rows, and
its attention reads a step over these blocks alone. DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.kernels.segmented import AttentionStep


@dataclass(frozen=True, slots=True)
class Compacted:
    """A step over the blocks of its own rows alone; a block that rows share comes once.

    Attributes:
        step: With a block table that counts these blocks.
        blocks: Their numbers in the pool, [blocks].
    """

    step: AttentionStep
    blocks: Tensor


def compact(step: AttentionStep, block_size: int) -> Compacted:
    """The step for layers that expand what they cache. Waits for the device: the blocks must be counted."""
    is_row = (step.span_row >= 0) & (step.span_count > 0) & (step.span_high < 0)
    rows, last = step.span_row[is_row].long(), (step.span_start + step.span_count - 1)[is_row].long()
    table = step.block_table[rows]
    first_place = torch.arange(table.shape[1], device=table.device) * block_size
    is_used = first_place <= step.place[last].unsqueeze(1)
    blocks, numbers = torch.unique(table[is_used], return_inverse=True)
    table[is_used] = numbers.to(table.dtype)
    of_all = torch.zeros_like(step.block_table)
    of_all[rows] = table
    return Compacted(replace(step, block_table=of_all), blocks)


def as_blocks(expanded: Tensor, block_size: int) -> Tensor:
    """Expanded keys or values [1, H, positions, D] as a pool [blocks, block size, H, D]."""
    positions = expanded[0].transpose(0, 1)
    return positions.reshape(-1, block_size, *positions.shape[1:])
