"""Attention of a step over the paged cache, summed in an order that depends on the token alone.

This module owns what every such kernel shares: the table of segments, what a step and a layer tell a kernel, the
registry of kernels by name, and the reference in torch.

A token's keys are summed segment by segment, and the segments lie at absolute positions: the first 8 have
``SEGMENT_LENGTH`` keys each, the next 12 twice as many, all others four times as many. Inside a segment keys are taken
a tile at a time, and the segments' sums are merged in order of position. So a token's output has the same bits alone or
beside others, drafted or not, and in one program or in many.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol, cast

import torch
from torch import Tensor

from specdec.core.drafts import MAX_TREE_TOKENS

SEGMENT_LENGTH = 256
"""Keys of each of the first segments: 256 up to 2k, 512 up to 8k, 1024 beyond. Part of what the numbers are."""
NO_TREE = 2**31 - 1
"""``tree_first`` of a token that is in no tree."""


def segment_start(segment: int, length: int = SEGMENT_LENGTH) -> int:
    """The first key position of a segment, where the first segments have ``length`` keys."""
    if segment < 8:
        return segment * length
    if segment < 20:
        return (8 + 2 * (segment - 8)) * length
    return (32 + 4 * (segment - 20)) * length


def num_segments(num_keys: int, length: int = SEGMENT_LENGTH) -> int:
    """How many segments hold the first ``num_keys`` keys."""
    if num_keys <= 8 * length:
        return -(-num_keys // length)
    if num_keys <= 32 * length:
        return 8 + -(-(num_keys - 8 * length) // (2 * length))
    return 20 + -(-(num_keys - 32 * length) // (4 * length))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is fixed for a model: kernels choose tiles by it and by nothing else.

    Attributes:
        num_heads: H.
        num_kv_heads: H_kv, which divides H.
        head_dim: D of queries and keys.
        value_dim: D_v of values.
        dtype: Of queries, keys and values: float32, float16 or bfloat16.
        block_size: Positions of a block of the cache.
        max_tokens: T, most tokens of a step.
        max_rows: R, most rows of a step.
        max_length: Most positions of a sequence.
        has_trees: Whether a step may hold trees.
        segment_length: Keys of the first segments; a power of two, and other than the default in tests alone.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    block_size: int
    max_tokens: int
    max_rows: int
    max_length: int
    has_trees: bool = False
    segment_length: int = SEGMENT_LENGTH

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads: {self.num_heads}, {self.num_kv_heads}")

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The tokens of a step, on the device; all int32 unless said otherwise.

    The tokens of a row follow one another: they are a span.

    Attributes:
        block_table: [slots, blocks of the longest sequence]: the block of each stretch of positions.
        row: [T], each token's row of the block table; -1 for padding, whose output is 0.
        place: [T], where in its sequence's cache the token's key lies; it reads none beyond.
        position: [T], the position by which windows count: that of the token's rotation.
        tree_first: [T], the place of the first token of the token's tree, or ``NO_TREE``.
        tree_word: int64 [T], bit i says that the token reads the tree's token i; its own bit is set.
        span_row: [S], a row of the block table; -1 for a span that is not there.
        span_start: [S], the first token.
        span_count: [S], how many tokens; 0 too for a span that is not there.
    """

    block_table: Tensor
    row: Tensor
    place: Tensor
    position: Tensor
    tree_first: Tensor
    tree_word: Tensor
    span_row: Tensor
    span_start: Tensor
    span_count: Tensor

    def to(self, device: torch.device) -> AttentionStep:
        """The same on another device."""
        return AttentionStep(*(getattr(self, field.name).to(device) for field in fields(self)))


def may_read(
    keys: Tensor,
    place: Tensor,
    position: Tensor,
    tree: tuple[Tensor, Tensor] | None,
    window: int | None,
    key_position: Tensor | None = None,
) -> Tensor:
    """Which keys of its own row a token reads: bool, in the shape that the arguments broadcast to.

    Args:
        keys: Their places.
        place: The token's; see :class:`AttentionStep`.
        position: The token's.
        tree: The token's ``tree_first`` and ``tree_word``; None where there are no trees.
        window: See :class:`AttentionLayer`.
        key_position: The keys' positions, where a tree may be deeper than the window; else it counts as inside.
    """
    allowed = keys <= place
    if tree is not None:
        first, word = tree
        is_before = keys < first
        allowed &= is_before | ((word >> (keys - first).clamp(0, MAX_TREE_TOKENS - 1)) & 1).bool()
        if window is not None and key_position is None:
            return allowed & ((keys > position - window) | ~is_before)
    if window is not None:
        allowed &= (keys if key_position is None else key_position) > position - window
    return allowed


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """What a layer's attention computes.

    Attributes:
        scaling: Factor of the scores.
        window: Positions that a token reads, its own among them; None for all. Trees are less deep than it.
        softcap: Scores are bounded smoothly to this magnitude.
        sinks: [H], a score for each head that takes probability and gives nothing.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionKernel(Protocol):
    """Computes the attention of steps of one shape."""

    def prepare(self, step: AttentionStep) -> None:
        """Take the next step: once, before its layers. Waits for nothing on the device."""
        ...

    def attend(self, queries: Tensor, key_pool: Tensor, value_pool: Tensor, layer: AttentionLayer) -> Tensor:
        """Attention of the step's tokens, whose keys and values are in the pools.

        Args:
            queries: [T, H, D].
            key_pool: [blocks, block size, H_kv, D].
            value_pool: [blocks, block size, H_kv, D_v].
            layer: The layer.

        Returns:
            [T, H, D_v] of the queries' type.
        """
        ...


MakeAttentionKernel = Callable[[AttentionShape, torch.device], AttentionKernel]
_KERNELS = {
    "triton": "specdec.kernels.triton.attention:TritonAttention",
    "gather": "specdec.kernels.gather:GatherAttention",
    "tiled": "specdec.kernels.tiled:TiledAttention",
    "reference": "specdec.kernels.segmented:ReferenceAttention",
}


def attention_kernel(name: str) -> MakeAttentionKernel:
    """The kernel of a name: ``triton``, ``gather``, ``tiled`` or ``reference``; ``module:function`` is somebody else's.

    Raises:
        ValueError: there is none of that name.
    """
    module, _, attribute = _KERNELS.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"attention kernel {name!r} is none of: {', '.join(_KERNELS)}, module:function")
    try:
        return cast(MakeAttentionKernel, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"attention kernel {name!r} cannot be imported: {error}") from error


class ReferenceAttention:
    """The same sums in the same order in plain torch, row by row: for CPUs, and to test kernels by.

    Args:
        shape: Of the model.
        device: Where its tensors are.
        keys_per_tile: Keys that are taken at a time within a segment.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, keys_per_tile: int = 64) -> None:
        self._shape = shape
        self._keys_per_tile = keys_per_tile
        self._step: AttentionStep | None = None

    def prepare(self, step: AttentionStep) -> None:
        """See :meth:`AttentionKernel.prepare`."""
        self._step = step

    def attend(self, queries: Tensor, key_pool: Tensor, value_pool: Tensor, layer: AttentionLayer) -> Tensor:
        """See :meth:`AttentionKernel.attend`."""
        step = self._step
        assert step is not None, "prepare comes first"
        output = queries.new_zeros(*queries.shape[:2], value_pool.shape[-1])
        for row in sorted(set(step.row.tolist())):
            if row >= 0:
                tokens = (step.row == row).nonzero()[:, 0]
                output[tokens] = self._row(queries[tokens], key_pool, value_pool, step, tokens, layer)
        return output

    def _row(
        self,
        queries: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        step: AttentionStep,
        tokens: Tensor,
        layer: AttentionLayer,
    ) -> Tensor:
        """[n, H, D] of one row -> [n, H, D_v]."""
        shape, place = self._shape, step.place[tokens]
        end = int(place.max()) + 1
        blocks = step.block_table[int(step.row[tokens[0]]), : -(-end // shape.block_size)].long()
        keys, values = (pool[blocks].flatten(0, 1)[:end].transpose(0, 1) for pool in (key_pool, value_pool))
        # Queries of a key head side by side: [H_kv, n * group, ..].
        packed = queries.view(len(tokens), shape.num_kv_heads, shape.group, -1).transpose(0, 1).flatten(1, 2)
        per_token = (step.place, step.position, step.tree_first, step.tree_word)
        place, position, *tree = (values[tokens].unsqueeze(1) for values in per_token)
        allowed = may_read(torch.arange(end, device=tokens.device), place, position, (tree[0], tree[1]), layer.window)
        allowed = allowed.repeat_interleave(shape.group, 0)
        # What no token may read may hold anything: 0 times a NaN would be one.
        is_read = allowed.any(0)
        values = torch.where(is_read[:, None], values, torch.zeros_like(values))
        state = empty_sums(packed, values.shape[2])
        for segment in range(num_segments(end, shape.segment_length)):
            start = segment_start(segment, shape.segment_length)
            stop = min(segment_start(segment + 1, shape.segment_length), end)
            part = empty_sums(packed, values.shape[2])
            for at in range(start, stop, self._keys_per_tile):
                tile = slice(at, min(at + self._keys_per_tile, stop))
                scores = scores_of(packed.float() @ keys[:, tile].float().transpose(1, 2), layer)
                scores = scores.masked_fill(~allowed[:, tile], -torch.inf)
                part = add_tile(part, scores, values[:, tile].float(), values.dtype)
            state = _merge(state, part)
        top, total, acc = state
        if layer.sinks is not None:
            sink = layer.sinks.float().view(shape.num_kv_heads, 1, shape.group) * math.log2(math.e)
            sink = sink.expand(-1, len(tokens), -1).flatten(1)
            largest = torch.maximum(top, sink)
            fade = torch.exp2(top - largest)
            total, acc = total * fade + torch.exp2(sink - largest), acc * fade.unsqueeze(2)
        result = (acc / total.unsqueeze(2)).to(queries.dtype)
        return result.view(shape.num_kv_heads, len(tokens), shape.group, -1).transpose(0, 1).flatten(1, 2)


Sums = tuple[Tensor, Tensor, Tensor]
"""Largest score in units of log 2, sum of weights, both [B, M], and weighted sum of values [B, M, D_v]."""


def empty_sums(queries: Tensor, value_dim: int) -> Sums:
    """Before any key: of queries [B, M, D]."""
    top = torch.full(queries.shape[:2], -torch.inf, device=queries.device)
    total = torch.zeros_like(top)
    return top, total, total.unsqueeze(2).repeat(1, 1, value_dim)


def scores_of(products: Tensor, layer: AttentionLayer) -> Tensor:
    """Scores in units of log 2, of float32 products of queries and keys."""
    if layer.softcap is None:
        return products * (layer.scaling * math.log2(math.e))
    doubled = torch.exp2(products * (layer.scaling / layer.softcap * 2 * math.log2(math.e)))
    return (1.0 - 2.0 / (doubled + 1.0)) * (layer.softcap * math.log2(math.e))


def add_tile(sums: Sums, scores: Tensor, values: Tensor, dtype: torch.dtype) -> Sums:
    """Add some more keys, exactly nothing where all scores are -inf.

    Args:
        sums: So far.
        scores: [B, M, keys].
        values: float32 [B, keys, D_v].
        dtype: What weights are rounded to before they multiply values.
    """
    top, total, acc = sums
    largest = torch.maximum(top, scores.amax(2))
    finite = largest.masked_fill(largest == -torch.inf, 0.0)
    weights, fade = torch.exp2(scores - finite.unsqueeze(2)), torch.exp2(top - finite)
    added = torch.matmul(weights.to(dtype).float(), values)
    return largest, total * fade + weights.sum(2), acc * fade.unsqueeze(2) + added


def _merge(state: Sums, part: Sums) -> Sums:
    largest = torch.maximum(state[0], part[0])
    finite = largest.masked_fill(largest == -torch.inf, 0.0)
    a, b = torch.exp2(state[0] - finite), torch.exp2(part[0] - finite)
    return largest, state[1] * a + part[1] * b, state[2] * a.unsqueeze(2) + part[2] * b.unsqueeze(2)
