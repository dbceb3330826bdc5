"""Attention of a step on a CPU whose products always have the same shape, so that a token's output has the same bits.

Queries are taken ``NUM_QUERIES`` of a row at a time, filled up where the row has fewer, and keys ``NUM_KEYS`` at a time
at absolute positions, those that a token may not read as -inf. A token's sums are added up in the order of its keys.
What it may not read adds nothing, exactly: so its output does not depend on how far the step's other tokens read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels.segmented import (
    AttentionLayer,
    AttentionShape,
    AttentionStep,
    add_tile,
    empty_sums,
    may_read,
    scores_of,
)

NUM_QUERIES = 8
"""Tokens of a row that read a tile together: one more costs a step of single tokens, one fewer costs prompts."""
NUM_KEYS = 256
"""Keys of a tile. Like the number of queries, part of what the numbers are."""


@dataclass(frozen=True, slots=True)
class _KeyTile:
    """What the first U of a step's units read of the keys at ``NUM_KEYS`` positions.

    Attributes:
        num_units: U.
        places: int64 [U * H_kv * keys], where each head's keys lie in the pool's flattened heads. In place of a key
            that none of the unit's tokens may read is that of its last token: others may hold anything.
        hidden: bool [U, 1, Q, 1, keys], what a token may not read.
    """

    num_units: int
    places: Tensor
    hidden: Tensor


class TiledAttention:
    """See :class:`~specdec.kernels.segmented.AttentionKernel`.

    Args:
        shape: Of the model.
        device: A CPU.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._step: AttentionStep | None = None
        self._lengths: list[int] = []
        self._tokens = self._own = torch.zeros(0, dtype=torch.int64)
        self._tiles: dict[int | None, list[_KeyTile]] = {}
        # Kept: where memory is new in each layer, a step of 16 rows spends most of its time on page faults.
        self._buffers = [torch.empty(0, device=device) for _ in range(2)]

    def prepare(self, step: AttentionStep) -> None:
        """See :meth:`AttentionKernel.prepare`; on a GPU this waits."""
        rows, places = step.row.tolist(), step.place.tolist()
        starts = [i for i, row in enumerate(rows) if not i or row != rows[i - 1]]
        units = [
            (start, min(start + NUM_QUERIES, stop))
            for first, stop in pairwise([*starts, len(rows)])
            if rows[first] >= 0
            for start in range(first, stop, NUM_QUERIES)
        ]
        units.sort(key=lambda unit: -places[unit[1] - 1])  # whoever reads a tile comes before those who do not
        self._lengths = [places[stop - 1] + 1 for _, stop in units]
        tokens = [min(start + i, stop - 1) for start, stop in units for i in range(NUM_QUERIES)]
        self._tokens = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        own = [number * NUM_QUERIES + i for number, unit in enumerate(units) for i in range(unit[1] - unit[0])]
        self._own = torch.tensor(own, dtype=torch.int64, device=self._device)
        self._step, self._tiles = step, {}

    def attend(self, queries: Tensor, key_pool: Tensor, value_pool: Tensor, layer: AttentionLayer) -> Tensor:
        """See :meth:`AttentionKernel.attend`."""
        shape, num_units = self._shape, len(self._lengths)
        if layer.window not in self._tiles:
            self._tiles[layer.window] = self._key_tiles(layer.window)
        # Tokens side by side, and of each token the heads that share a key head.
        packed = queries.index_select(0, self._tokens).view(num_units, NUM_QUERIES, shape.num_kv_heads, shape.group, -1)
        packed = packed.transpose(1, 2).float().flatten(2, 3).flatten(0, 1)
        sums = empty_sums(packed, value_pool.shape[-1])
        for tile in self._tiles[layer.window]:
            n = tile.num_units * shape.num_kv_heads
            keys, values = self._read(key_pool, tile, 0), self._read(value_pool, tile, 1)
            scores = scores_of(torch.bmm(packed[:n], keys.transpose(1, 2)), layer)
            seen = scores.view(tile.num_units, shape.num_kv_heads, NUM_QUERIES, shape.group, NUM_KEYS)
            seen.masked_fill_(tile.hidden, -torch.inf)
            added = add_tile((sums[0][:n], sums[1][:n], sums[2][:n]), scores, values, shape.dtype)
            for whole, part in zip(sums, added, strict=True):
                whole[:n] = part
        top, total, weighted = sums
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(shape.num_kv_heads, 1, shape.group) * math.log2(math.e)
            sinks = sinks.expand(num_units, -1, NUM_QUERIES, -1).reshape(top.shape)
            largest = torch.maximum(top, sinks)
            fade = torch.exp2(top - largest)
            total, weighted = total * fade + torch.exp2(sinks - largest), weighted * fade.unsqueeze(2)
        result = (weighted / total.unsqueeze(2)).to(queries.dtype)
        result = result.view(num_units, shape.num_kv_heads, NUM_QUERIES, shape.group, -1).transpose(1, 2)
        output = queries.new_zeros(*queries.shape[:2], value_pool.shape[-1])
        flat = result.reshape(num_units * NUM_QUERIES, *output.shape[1:])
        return output.index_copy_(0, self._tokens.index_select(0, self._own), flat.index_select(0, self._own))

    def _key_tiles(self, window: int | None) -> list[_KeyTile]:
        """The tiles that some token reads, in order of their keys."""
        step, size = self._step, self._shape.block_size
        assert step is not None, "prepare comes first"
        if not self._lengths:
            return []
        place, position, first, word = (
            values.index_select(0, self._tokens).view(-1, NUM_QUERIES, 1)
            for values in (step.place, step.position, step.tree_first, step.tree_word)
        )
        table = step.block_table.index_select(0, step.row.index_select(0, self._tokens[::NUM_QUERIES]))
        heads = torch.arange(self._shape.num_kv_heads, device=self._device)
        start = 0 if window is None else max(0, int(position.min()) - window + 1) // NUM_KEYS
        tiles = []
        for number in range(start, -(-self._lengths[0] // NUM_KEYS)):
            n = sum(length > number * NUM_KEYS for length in self._lengths)
            keys = torch.arange(number * NUM_KEYS, (number + 1) * NUM_KEYS, dtype=torch.int32, device=self._device)
            tree = (first[:n], word[:n]) if self._shape.has_trees else None
            allowed = may_read(keys, place[:n], position[:n], tree, window)
            at = torch.where(allowed.any(1), keys, place[:n, -1]).long()
            slots = table[:n].gather(1, at // size).long() * size + at % size
            places = slots.unsqueeze(1) * len(heads) + heads.unsqueeze(1)
            tiles.append(_KeyTile(n, places.flatten(), ~allowed[:, None, :, None]))
        return tiles

    def _read(self, pool: Tensor, tile: _KeyTile, number: int) -> Tensor:
        """float32 [U * H_kv, keys, D], until the next reading of that number."""
        read = pool.flatten(0, 2).index_select(0, tile.places)
        if self._buffers[number].numel() < read.numel():
            self._buffers[number] = read.new_empty(read.numel(), dtype=torch.float32)
        kept = self._buffers[number][: read.numel()].view(-1, NUM_KEYS, pool.shape[-1])
        return kept.copy_(read.view(kept.shape))
