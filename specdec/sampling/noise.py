"""Gumbel noise kept between steps: a position's noise is wanted again by later rounds and by other branches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sampling.philox import gumbel

_POSITIONS_PER_BLOCK = 8
_BYTES_PER_VALUE = 4

Block = tuple[int, int]
"""A seed, and a position divided by the positions per block."""


class NoiseCache:
    """The newest blocks of :func:`~specdec.sampling.philox.gumbel` noise, eight positions of one seed each.

    A round verifies positions that the round before has verified too, and a drafter's branches share theirs, so that
    most rows are made once and read several times; and a block of eight rows costs about three times one row. What
    comes out is exactly what ``gumbel`` gives. Not safe for several threads at once.

    Args:
        vocab_size: V.
        max_bytes: Memory for the blocks; batches that would need more than half of it are served without keeping
            anything, as are those on a GPU, which makes noise as fast as it reads it.
    """

    def __init__(self, vocab_size: int, max_bytes: int) -> None:
        self._vocab_size = vocab_size
        self._max_blocks = max_bytes // (vocab_size * _POSITIONS_PER_BLOCK * _BYTES_PER_VALUE)
        self._blocks: OrderedDict[Block, Tensor] = OrderedDict()

    def rows(self, seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
        """Noise for N (seed, position) pairs: float32 [N, V] on ``device``, the caller's to change."""
        blocks = [(seed, position // _POSITIONS_PER_BLOCK) for seed, position in zip(seeds, positions, strict=True)]
        wanted = dict.fromkeys(blocks)
        if 2 * len(wanted) > self._max_blocks or device.type != "cpu":
            return gumbel(seeds, positions, self._vocab_size, device)
        missing = [block for block in wanted if block not in self._blocks]
        offsets = range(_POSITIONS_PER_BLOCK)
        made = gumbel(
            [seed for seed, _ in missing for _ in offsets],
            [number * _POSITIONS_PER_BLOCK + offset for _, number in missing for offset in offsets],
            self._vocab_size,
            device,
        ).reshape(len(missing), _POSITIONS_PER_BLOCK, self._vocab_size)
        self._blocks |= {block: noise.clone() for block, noise in zip(missing, made, strict=True)}
        for block in wanted:
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return torch.stack(
            [self._blocks[at][i % _POSITIONS_PER_BLOCK] for at, i in zip(blocks, positions, strict=True)]
        )
