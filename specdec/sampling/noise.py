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
        max_bytes: Memory for the blocks, taken at the first use; batches that would need more than half of it
            are served without keeping anything.
    """

    def __init__(self, vocab_size: int, max_bytes: int) -> None:
        self._vocab_size = vocab_size
        self._num_slots = max_bytes // (vocab_size * _POSITIONS_PER_BLOCK * _BYTES_PER_VALUE)
        self._slots: OrderedDict[Block, int] = OrderedDict()
        self._store: Tensor | None = None

    def rows(self, seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
        """Noise for N (seed, position) pairs: float32 [N, V] on ``device``, the caller's to change."""
        if self._num_slots < 2:
            return gumbel(seeds, positions, self._vocab_size, device)
        blocks = [(seed, position // _POSITIONS_PER_BLOCK) for seed, position in zip(seeds, positions, strict=True)]
        wanted = dict.fromkeys(blocks)
        if 2 * len(wanted) > self._num_slots:
            return gumbel(seeds, positions, self._vocab_size, device)
        store = self._stored(device)
        for block in wanted.keys() & self._slots.keys():
            self._slots.move_to_end(block)
        self._make([block for block in wanted if block not in self._slots], store)
        indexes = [
            self._slots[block] * _POSITIONS_PER_BLOCK + position % _POSITIONS_PER_BLOCK
            for block, position in zip(blocks, positions, strict=True)
        ]
        return store.index_select(0, torch.tensor(indexes, device=device))

    def _stored(self, device: torch.device) -> Tensor:
        """The blocks' rows, float32 [slots * 8, V]; emptied where the device has changed."""
        if self._store is None or self._store.device != device:
            self._slots.clear()
            self._store = torch.empty(self._num_slots * _POSITIONS_PER_BLOCK, self._vocab_size, device=device)
        return self._store

    def _make(self, missing: Sequence[Block], store: Tensor) -> None:
        """Compute blocks, in the places of those unused for longest."""
        if not missing:
            return
        offsets = range(_POSITIONS_PER_BLOCK)
        seeds = [seed for seed, _ in missing for _ in offsets]
        positions = [number * _POSITIONS_PER_BLOCK + offset for _, number in missing for offset in offsets]
        noise = gumbel(seeds, positions, self._vocab_size, store.device)
        for i, block in enumerate(missing):
            slot = len(self._slots)
            if slot == self._num_slots:
                _, slot = self._slots.popitem(last=False)
            self._slots[block] = slot
            store[slot * _POSITIONS_PER_BLOCK :][:_POSITIONS_PER_BLOCK] = noise[i * _POSITIONS_PER_BLOCK :][
                :_POSITIONS_PER_BLOCK
            ]
