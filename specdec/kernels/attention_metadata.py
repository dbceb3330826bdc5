"""Where one step's tokens go in the cache, and which cached keys each of them reads.

Built once per step from the block tables; index tensors and masks are made once per attention window and device and
used by every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

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


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One sequence's part in a step.

    Attributes:
        start: Index of its first new token among the step's flattened tokens.
        num_new_tokens: At least 1.
        num_computed_tokens: Tokens cached before; the first new token's position.
        block_ids: Its block table, with room for the new tokens.
        parents: Where the last new tokens are a tree, which of these each one follows, -1 for the token before them. A
            query reads what comes before the tree, and in it itself and its ancestors.
    """

    start: int
    num_new_tokens: int
    num_computed_tokens: int
    block_ids: Sequence[int]
    parents: Sequence[int] = ()

    @property
    def length(self) -> int:
        """Positions cached once the step is done."""
        return self.num_computed_tokens + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that one attention call serves; all tensors on one device.

    Attributes:
        num_rows: R.
        num_queries: T, queries per row; shorter rows repeat their last token.
        queries: Flat indices of the queries: a slice where they are consecutive, else int64 [R * T].
        blocks: Blocks to gather, int64 [R * blocks per row].
        num_keys: S, keys per row, counted from ``first_key`` in the gathered slots.
        first_key: Keys to skip at the beginning of the first block.
        mask: Additive (0 or -inf), [R, 1, heads per key head * T, S] where ``is_packed``, else [1, 1, T, S]; None where
            every query reads every key, or where ``is_causal``.
        is_causal: The one row is as long as its keys, and reads them causally.
        is_packed: Few queries: those of all heads that share a key head are to stand in one matrix, head by head.
    """

    num_rows: int
    num_queries: int
    queries: slice | torch.Tensor
    blocks: torch.Tensor
    num_keys: int
    first_key: int
    mask: torch.Tensor | None
    is_causal: bool
    is_packed: bool


class StepPlan:
    """The rows of one step over ``num_tokens`` flattened tokens.

    Tokens that no row covers (the padding of a [batch, length] layout) are written to the trash slot and read nothing.

    Args:
        rows: Spans that do not overlap.
        num_tokens: Flattened tokens, padding included.
        block_size: Positions per block.
        trash_slot: Slot that padding is written to.
    """

    def __init__(self, rows: Sequence[RowSpan], num_tokens: int, block_size: int, trash_slot: int) -> None:
        self.rows = rows
        self.num_tokens = num_tokens
        self.block_size = block_size
        self.has_trees = any(row.parents for row in rows)
        self.has_padding = num_tokens > sum(row.num_new_tokens for row in rows)
        self._slot_mapping = torch.tensor(self._slot_mapping_list(trash_slot))
        self._slot_mapping_on: dict[torch.device, torch.Tensor] = {}
        self._memo: dict[tuple[object, ...], Any] = {}

    def slot_mapping(self, device: torch.device) -> torch.Tensor:
        """Slot each flattened token is written to: int64 [num_tokens]."""
        slots = self._slot_mapping_on.get(device)
        if slots is None:
            slots = self._slot_mapping_on[device] = self._slot_mapping.to(device)
        return slots

    def groups(self, window: int | None, queries: torch.Tensor, key_pool: torch.Tensor) -> list[AttentionGroup]:
        """The attention calls of a layer, made once for all layers of its shape.

        Args:
            window: Positions read, the query's own among them; None reads all.
            queries: [N, H, D].
            key_pool: [blocks, block size, H_kv, D].
        """
        device, dtype = queries.device, queries.dtype
        num_heads, num_key_heads, head_dim = queries.shape[1], key_pool.shape[2], key_pool.shape[3]
        kind = (window, num_heads, num_key_heads, head_dim, dtype, device)
        groups: list[AttentionGroup] | None = self._memo.get(kind)
        if groups is None:
            spans = [self.key_span(row, window) for row in _tiles(self.rows)]
            batches = _batches(spans, num_key_heads * head_dim, device)
            shape = _LayerShape(window, num_heads // num_key_heads, dtype, device)
            groups = self._memo[kind] = [self._group(batch, shape) for batch in batches]
        return groups

    def memo(self, kind: tuple[object, ...], make: Callable[[], _T]) -> _T:
        """What ``make`` gives, made once per step and kind."""
        if kind not in self._memo:
            self._memo[kind] = make()
        value: _T = self._memo[kind]
        return value

    def _slot_mapping_list(self, trash_slot: int) -> list[int]:
        size = self.block_size
        slots = [trash_slot] * self.num_tokens if self.has_padding else []
        for row in self.rows:
            blocks = row.block_ids
            row_slots = [
                blocks[position // size] * size + position % size
                for position in range(row.num_computed_tokens, row.length)
            ]
            if self.has_padding:
                slots[row.start : row.start + row.num_new_tokens] = row_slots
            else:
                assert row.start == len(slots), "without padding, rows must come in order"
                slots += row_slots
        return slots

    def key_span(self, row: RowSpan, window: int | None) -> KeySpan:
        """What a row reads in a layer that reads the last ``window`` positions."""
        first = 0 if window is None else max(0, row.num_computed_tokens - window + 1)
        first_block = first // self.block_size
        blocks = list(row.block_ids[first_block : -(-row.length // self.block_size)])
        return KeySpan(row, first_block * self.block_size, first, blocks)

    def _group(self, batch: list[KeySpan], shape: _LayerShape) -> AttentionGroup:
        num_queries = max(span.row.num_new_tokens for span in batch)
        first_key = min(span.first - span.base for span in batch)
        num_keys = max(span.num_keys for span in batch) - first_key
        is_packed = num_queries <= MAX_SHORT_TOKENS
        is_causal = not is_packed and _is_plainly_causal(batch[0].row, shape.window)
        mask = None
        if not is_causal and not (num_queries == 1 and _have_same_keys(batch)):
            mask = _mask(batch, num_queries, first_key, num_keys, shape)
            mask = mask.repeat(1, 1, shape.heads_per_key, 1) if is_packed else mask
        table = padded_block_table([span.blocks for span in batch])
        return AttentionGroup(
            num_rows=len(batch),
            num_queries=num_queries,
            queries=_query_indices([span.row for span in batch], num_queries, shape.device),
            blocks=torch.tensor(table, device=shape.device).view(-1),
            num_keys=num_keys,
            first_key=first_key,
            mask=mask,
            is_causal=is_causal,
            is_packed=is_packed,
        )


@dataclass(frozen=True, slots=True)
class _LayerShape:
    window: int | None
    heads_per_key: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys a row reads: positions [first, row.length), in ``blocks``, whose first position is ``base``."""

    row: RowSpan
    base: int
    first: int
    blocks: list[int]

    @property
    def num_keys(self) -> int:
        """Positions from ``base`` to the row's end."""
        return self.row.length - self.base


def _tiles(rows: Sequence[RowSpan]) -> Iterator[RowSpan]:
    for row in rows:
        for offset in range(0, row.num_new_tokens, MAX_TILE_TOKENS):
            num_tokens = min(MAX_TILE_TOKENS, row.num_new_tokens - offset)
            yield RowSpan(row.start + offset, num_tokens, row.num_computed_tokens + offset, row.block_ids, row.parents)


def _batches(spans: list[KeySpan], key_width: int, device: torch.device) -> list[list[KeySpan]]:
    """Split spans into groups: long ones alone, short ones with others of about the same size."""
    max_keys = max_group_numbers(device) // key_width
    batches: list[list[KeySpan]] = []
    shared: list[KeySpan] = []
    for span in spans:
        if span.row.num_new_tokens > MAX_SHORT_TOKENS:
            batches.append([span])
        else:
            shared.append(span)
    shared.sort(key=lambda span: (_size_class(span), span.num_keys))
    batch: list[KeySpan] = []
    for span in shared:
        if not batch or not _fits(batch, span, max_keys):
            batch = []
            batches.append(batch)
        batch.append(span)
    for batch in batches:
        batch.sort(key=lambda span: span.row.start)  # consecutive queries need no index
    return batches


def _fits(batch: list[KeySpan], span: KeySpan, max_keys: int) -> bool:
    """Whether a span, no shorter than those of the batch, joins them without much padding."""
    return (
        _size_class(batch[0]) == _size_class(span)
        and span.num_keys <= 2 * batch[0].num_keys + 64
        and (len(batch) + 1) * span.num_keys <= max_keys
    )


def _size_class(span: KeySpan) -> int:
    return (span.row.num_new_tokens - 1).bit_length()


def _mask(batch: list[KeySpan], num_queries: int, first_key: int, num_keys: int, shape: _LayerShape) -> torch.Tensor:
    """Additive mask [R, 1, T, S]: a query reads the keys up to its own position, at most ``window`` of them."""
    hidden_value, device = float("-inf"), shape.device
    if len(batch) == 1 and shape.window is None and not batch[0].row.parents:
        corner = torch.full((num_queries, num_queries), hidden_value, dtype=shape.dtype, device=device).triu_(1)
        return torch.nn.functional.pad(corner, (num_keys - num_queries, 0)).view(1, 1, num_queries, num_keys)
    bounds = torch.tensor(
        [[span.row.num_computed_tokens, span.row.length - 1, span.base + first_key] for span in batch], device=device
    )
    past, last, first = bounds.view(-1, 3, 1, 1).unbind(1)
    queries = torch.minimum(past + torch.arange(num_queries, device=device)[:, None], last)
    keys = first + torch.arange(num_keys, device=device)
    hidden = keys > queries
    keys = keys.expand(len(batch), 1, num_keys)
    for i, span in enumerate(batch):
        if span.row.parents:
            _hide_other_paths(span, hidden[i], queries[i], keys[i, 0], first_key)
    if shape.window is not None:
        hidden |= keys <= queries - shape.window
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=device).masked_fill_(hidden, hidden_value)
    return mask.unsqueeze(1)


def _hide_other_paths(
    span: KeySpan, hidden: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, first_key: int
) -> None:
    """Change what a row with a tree reads: in the tree its ancestors alone, at the positions that their depths say.

    Args:
        span: The row.
        hidden: bool [T, S], and
        queries: [T, 1], the queries' positions, and
        keys: [S], the keys' positions; all by slots until now.
        first_key: As in :class:`AttentionGroup`.
    """
    parents, row = span.row.parents, span.row
    size = len(parents)
    reads, depth = ancestors(parents, hidden.device)
    place, key = row.num_new_tokens - size, row.length - size - span.base - first_key
    root = row.length - size - 1
    last = [-1] * (len(hidden) - row.num_new_tokens)  # a shorter row repeats its last token
    order = torch.tensor([*range(size), *last], device=hidden.device)
    hidden[place:, key : key + size] = ~reads[order]
    queries[place:, 0] = root + depth[order]
    keys[key : key + size] = root + depth


def ancestors(parents: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a tree's T tokens: bool [T, T], whether a token follows another or is it; int64 [T], how deep it stands."""
    reads = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            reads[i] |= reads[parent]
    reads = reads.to(device)
    return reads, reads.sum(1)


def _is_plainly_causal(row: RowSpan, window: int | None) -> bool:
    if row.parents:
        return False
    return row.num_computed_tokens == 0 and (window is None or row.num_new_tokens <= window)


def _have_same_keys(batch: list[KeySpan]) -> bool:
    first = batch[0]
    return all((span.first - span.base, span.num_keys) == (first.first - first.base, first.num_keys) for span in batch)


def _query_indices(rows: list[RowSpan], num_queries: int, device: torch.device) -> slice | torch.Tensor:
    start = rows[0].start
    if all(row.num_new_tokens == num_queries and row.start == start + i * num_queries for i, row in enumerate(rows)):
        return slice(start, start + len(rows) * num_queries)
    indices = [row.start + min(offset, row.num_new_tokens - 1) for row in rows for offset in range(num_queries)]
    return torch.tensor(indices, device=device)


def padded_block_table(tables: list[list[int]]) -> list[list[int]]:
    """Tables filled up to the longest with their own last block: rows never read each other's."""
    width = max(map(len, tables))
    return [table + [table[-1]] * (width - len(table)) for table in tables]
