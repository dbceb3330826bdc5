"""Attention by copies of the keys and values that rows read, and torch's own operators: on any device.

How large the copies are follows from the rows, so a step's sizes are read back once. On a CPU that costs nothing; on a
GPU it is a wait, which is why other kernels come first there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from specdec.kernels.segmented import NO_TREE, AttentionLayer, AttentionShape, AttentionStep, may_read

MAX_SHORT_TOKENS = 16
"""Rows of at most this many new tokens are read in padded groups."""
MAX_TILE_TOKENS = 512
"""Longer rows are cut into tiles of this many queries, so that masks stay small."""
MAX_GROUP_NUMBERS = {"cpu": 2_500_000}
"""Bound on the numbers gathered as keys for one group: a CPU's caches hold no more."""
_MAX_GROUP_NUMBERS_ELSEWHERE = 64_000_000


def max_group_numbers(device: torch.device) -> int:
    """Bound on the numbers gathered as keys at once, and on those gathered as values, but that a row is never cut."""
    return MAX_GROUP_NUMBERS.get(device.type, _MAX_GROUP_NUMBERS_ELSEWHERE)


class Workspace:
    """Buffers that gathered keys and values are copied into, one of each kind, reused by all layers in turn."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def rows(self, name: str, num_rows: int, like: Tensor) -> Tensor:
        """Uninitialised [num_rows, *like.shape[1:]] of the dtype and device of ``like``."""
        kind = (name, like.dtype, like.device, like.shape[1:])
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) < num_rows:
            buffer = self._buffers[kind] = like.new_empty((num_rows, *like.shape[1:]))
        return buffer[:num_rows]


class _Span(NamedTuple):
    """Tokens of one row: ``num_tokens`` from ``start`` on, of which the first lies at ``place`` in the row's cache."""

    row: int
    start: int
    num_tokens: int
    place: int
    has_tree: bool

    @property
    def length(self) -> int:
        """Positions up to the last token's."""
        return self.place + self.num_tokens

    def first_key(self, window: int | None) -> int:
        """The first position that is read."""
        return 0 if window is None else max(0, self.place - window + 1)


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans that one attention call serves.

    Attributes:
        num_rows: R.
        num_queries: T, queries per row; shorter rows repeat their last token.
        queries: Indices of the queries: a slice where they are consecutive, else int64 [R * T].
        blocks: Blocks to gather, int32 [R * blocks per row].
        num_keys: S, keys per row, counted from ``first_key`` in the gathered slots.
        first_key: Keys to skip at the beginning of the first block.
        mask: Additive (0 or -inf), [R, 1, heads per key head * T, S] where ``is_packed``, else [1, 1, T, S]; None where
            every query reads every key, or where ``is_causal``.
        is_causal: The one row is as long as its keys, and reads them causally.
        is_packed: Few queries: those of all heads that share a key head are to stand in one matrix, head by head.
    """

    num_rows: int
    num_queries: int
    queries: slice | Tensor
    blocks: Tensor
    num_keys: int
    first_key: int
    mask: Tensor | None
    is_causal: bool
    is_packed: bool


class GatherAttention:
    """See :class:`~specdec.kernels.segmented.AttentionKernel`.

    Args:
        shape: Of the model.
        device: Any.
        workspace: Shared with other kernels of the model.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, workspace: Workspace | None = None) -> None:
        self._shape, self._device = shape, device
        self._workspace = workspace or Workspace()
        self._step: AttentionStep | None = None
        self._spans: list[_Span] = []
        self._groups: dict[int | None, list[_Group]] = {}

    def prepare(self, step: AttentionStep) -> None:
        """See :meth:`AttentionKernel.prepare`; on a GPU this waits."""
        self._step, self._groups = step, {}
        places = step.place.cpu().numpy()
        trees = step.tree_first.cpu().numpy() if self._shape.has_trees else None
        columns = (values.tolist() for values in (step.span_row, step.span_start, step.span_count))
        self._spans = []
        for row, start, count in zip(*columns, strict=True):
            if row < 0 or not count:
                continue
            place, end = int(places[start]), start + count
            has_tree = trees is not None and trees[end - 1] != NO_TREE
            for at in range(start, end, MAX_TILE_TOKENS):
                size = min(MAX_TILE_TOKENS, end - at)
                self._spans.append(_Span(row, at, size, place + at - start, has_tree))

    def attend(self, queries: Tensor, key_pool: Tensor, value_pool: Tensor, layer: AttentionLayer) -> Tensor:
        """See :meth:`AttentionKernel.attend`."""
        groups = self._groups.get(layer.window)
        if groups is None:
            batches = _batches(self._spans, layer.window, max_group_numbers(self._device) // key_pool[0, 0].numel())
            groups = self._groups[layer.window] = [self._group(batch, layer.window) for batch in batches]
        output: Tensor | None = None
        is_whole = len(groups) == 1 and groups[0].num_rows * groups[0].num_queries == len(queries)
        if not is_whole or not isinstance(groups[0].queries, slice):
            output = queries.new_zeros(*queries.shape[:2], value_pool.shape[-1])
        for group in groups:
            rows = queries[group.queries].view(group.num_rows, group.num_queries, *queries.shape[1:])
            keys, values = self._copied(key_pool, group, "keys"), self._copied(value_pool, group, "values")
            result = _attend(rows, keys, values, group, layer).flatten(0, 1)
            if output is None:
                return result
            output[group.queries] = result
        assert output is not None
        return output

    def _copied(self, pool: Tensor, group: _Group, name: str) -> Tensor:
        """What a group's rows read, [R, S, H_kv, D]."""
        buffer = self._workspace.rows(name, len(group.blocks), pool)
        torch.index_select(pool, 0, group.blocks, out=buffer)
        slots = buffer.view(group.num_rows, -1, *pool.shape[2:])
        return slots[:, group.first_key : group.first_key + group.num_keys]

    def _group(self, batch: list[_Span], window: int | None) -> _Group:
        assert self._step is not None, "prepare comes first"
        size, table = self._shape.block_size, self._step.block_table
        num_queries = max(span.num_tokens for span in batch)
        is_packed = num_queries <= MAX_SHORT_TOKENS
        is_causal = not is_packed and _is_plainly_causal(batch[0], window)
        first_block = [span.first_key(window) // size for span in batch]
        last_block = [(span.length - 1) // size for span in batch]
        base = [first * size for first in first_block]
        first_key = min(span.first_key(window) - b for span, b in zip(batch, base, strict=True))
        num_keys = max(span.length - b for span, b in zip(batch, base, strict=True)) - first_key
        if len(batch) == 1:
            blocks = table[batch[0].row, first_block[0] : last_block[0] + 1]
        else:
            width = 1 + max(last - first for first, last in zip(first_block, last_block, strict=True))
            entry = np.asarray(first_block)[:, None] + np.arange(width)
            # Shorter rows go on with their own last block: rows never read each other's.
            entry = np.minimum(entry, np.asarray(last_block)[:, None])
            entry += np.asarray([span.row for span in batch])[:, None] * table.shape[1]
            blocks = table.view(-1).index_select(0, self._from_host(entry.reshape(-1)))
        queries = self._queries(batch, num_queries)
        mask = None
        if not is_causal and not (num_queries == 1 and _have_same_keys(batch, window, size)):
            mask = self._mask(batch, queries, [b + first_key for b in base], num_keys, window)
            mask = mask.repeat(1, 1, self._shape.group, 1) if is_packed else mask
        return _Group(
            len(batch),
            num_queries,
            queries,
            blocks,
            num_keys,
            first_key,
            mask,
            is_causal=is_causal,
            is_packed=is_packed,
        )

    def _queries(self, batch: list[_Span], num_queries: int) -> slice | Tensor:
        start = batch[0].start
        if all(
            span.num_tokens == num_queries and span.start == start + i * num_queries for i, span in enumerate(batch)
        ):
            return slice(start, start + len(batch) * num_queries)
        starts, counts = (np.asarray([getattr(span, name) for span in batch]) for name in ("start", "num_tokens"))
        index = starts[:, None] + np.minimum(np.arange(num_queries), counts[:, None] - 1)
        return self._from_host(index.reshape(-1))

    def _mask(
        self, batch: list[_Span], queries: slice | Tensor, first: list[int], num_keys: int, window: int | None
    ) -> Tensor:
        """Additive mask [R, 1, T, S]."""
        step, dtype, hidden = self._step, self._shape.dtype, float("-inf")
        assert step is not None
        has_tree = any(span.has_tree for span in batch)
        if len(batch) == 1 and window is None and not has_tree:
            n = batch[0].num_tokens
            corner = torch.full((n, n), hidden, dtype=dtype, device=self._device).triu_(1)
            return pad(corner, (num_keys - n, 0)).view(1, 1, n, num_keys)
        place, position, tree_first, tree_word = (
            values[queries].view(len(batch), -1, 1)
            for values in (step.place, step.position, step.tree_first, step.tree_word)
        )
        keys = self._from_host(np.asarray(first, np.int32)[:, None, None] + np.arange(num_keys, dtype=np.int32))
        if has_tree:
            key_position = keys.clone()  # a tree's tokens lie one after another, and stand at their depths
            for of_row, span, at in zip(key_position[:, 0], batch, first, strict=True):
                own = slice(span.start, span.start + span.num_tokens)
                of_row[span.place - at : span.length - at] = step.position[own]
            allowed = may_read(keys, place, position, (tree_first, tree_word), window, key_position)
        else:
            allowed = may_read(keys, place, position, None, window)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=self._device).masked_fill_(~allowed, hidden)
        return mask.unsqueeze(1)

    def _from_host(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _batches(spans: Sequence[_Span], window: int | None, max_keys: int) -> list[list[_Span]]:
    """Split spans into groups: long ones alone, short ones with others of about the same size."""
    batches = [[span] for span in spans if span.num_tokens > MAX_SHORT_TOKENS]
    short = (span for span in spans if span.num_tokens <= MAX_SHORT_TOKENS)
    sized = [((span.num_tokens - 1).bit_length(), span.length - span.first_key(window), span) for span in short]
    batch: list[_Span] = []
    of_batch = least = -1
    for size_class, num_keys, span in sorted(sized, key=lambda one: one[:2]):
        # No shorter than the others, it joins them where that takes not much padding.
        fits = size_class == of_batch and num_keys <= 2 * least + 64 and (len(batch) + 1) * num_keys <= max_keys
        if not fits:
            batch, of_batch, least = [], size_class, num_keys
            batches.append(batch)
        batch.append(span)
    for batch in batches:
        batch.sort(key=lambda span: span.start)  # consecutive queries need no index
    return batches


def _is_plainly_causal(span: _Span, window: int | None) -> bool:
    return span.place == 0 and not span.has_tree and (window is None or span.num_tokens <= window)


def _have_same_keys(batch: list[_Span], window: int | None, block_size: int) -> bool:
    return len({(span.first_key(window) % block_size, span.length - span.first_key(window)) for span in batch}) == 1


def _attend(queries: Tensor, keys: Tensor, values: Tensor, group: _Group, layer: AttentionLayer) -> Tensor:
    """[R, T, H, D] over [R, S, H_kv, D] -> [R, T, H, D_v], with query heads grouped by the key head they share."""
    num_rows, num_queries, num_heads, head_dim = queries.shape
    num_groups = num_heads // keys.shape[2]
    grouped = queries.view(num_rows, num_queries, -1, num_groups, head_dim)
    sinks = layer.sinks
    if group.is_packed:
        q = grouped.permute(0, 2, 3, 1, 4).reshape(num_rows, -1, num_groups * num_queries, head_dim)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        if sinks is not None:
            sinks = sinks.view(-1, num_groups).repeat_interleave(num_queries, dim=1).view(1, -1, q.shape[2], 1)
        result = _dot_product(q, k, v, group, layer, sinks)
        result = result.view(num_rows, -1, num_groups, num_queries, values.shape[-1])
        return result.permute(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, -1)
    # One long row: key heads become the batch, and each is seen by its query heads without being copied.
    q = grouped[0].permute(1, 2, 0, 3)
    k, v = (x[0].transpose(0, 1).unsqueeze(1).expand(-1, num_groups, -1, -1) for x in (keys, values))
    sinks = None if sinks is None else sinks.view(-1, num_groups, 1, 1)
    return _dot_product(q, k, v, group, layer, sinks).permute(2, 0, 1, 3).reshape(1, num_queries, num_heads, -1)


def _dot_product(q: Tensor, k: Tensor, v: Tensor, group: _Group, layer: AttentionLayer, sinks: Tensor | None) -> Tensor:
    """Scaled dot-product attention, [.., T, D] over [.., S, D]; term by term where scores are capped or have sinks."""
    scaling, softcap = layer.scaling, layer.softcap
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.is_causal, scale=scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if group.is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
    if group.mask is not None:
        scores = scores + group.mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[-2]], v)
