"""The attention of :mod:`specdec.kernels.segmented` as Triton kernels, and the write into the cache.

This module owns these kernels and their buffers. ``_make_tiles`` packs a step's tokens into tiles, ``_make_items``
lists the work, one list for each window, ``_attend`` runs through it with a fixed number of programs, ``_merge`` adds
what segments gave in order. The first two run once a step, on the device, so that a captured graph serves any mix of
rows. ``_write_cache`` writes a layer's keys and values before that.

An item is some segments of a tile that follow one another, as many as a program's share of the step's segments. A tile
of no more than that is one item, and has no partial results. Of another tile the first item adds its segments up, and
the others keep each segment's sums. ``_attend`` adds in registers as ``_merge`` does from memory, in the same order and
with the same bits, however the segments are shared out. For that all are compiled without contracting products and sums
(``enable_fp_fusion=False``).

A tile's rows, keys and warps follow from the model's shape and the device and never from a batch: the numbers depend on
them. Its stages say how many loads are under way: keys are read through the block table, whose entries Triton loads in
stages of their own, so that 5 stages are two buffers for keys and two for values, and fewer are one.

With dependent launches a kernel is launched while the one before it still runs, and its first statement waits for that
one's end. What is saved is the time of a launch. The numbers are the same.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from specdec.kernels.segmented import AttentionLayer, AttentionShape, AttentionStep, num_segments

_LOG2_E = math.log2(math.e)
_PROGRAMS_PER_PROCESSOR = 2
_TWO_BUFFERS, _ONE_BUFFER = 5, 2
"""Stages with two buffers for keys and values each, and with one."""
_LEAST_SHARED_BYTES = 99 << 10
"""Shared memory that a program may have on every GPU of compute capability 8.0 or more."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a tile is computed.

    Attributes:
        rows: Queries of a key head, packed: tokens times heads.
        keys: Keys taken at a time.
        num_warps: Of a program.
        num_stages: Of loads; see above.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    @property
    def has_two_buffers(self) -> bool:
        """Whether the next keys and values are read while some are used."""
        return self.num_stages >= _TWO_BUFFERS

    def shared_bytes(self, shape: AttentionShape) -> int:
        """Shared memory that a program takes, at most."""
        width, value_width = _padded(shape.head_dim), _padded(shape.value_dim)
        num_buffers = 2 if self.has_two_buffers else 1
        numbers = num_buffers * self.keys * (width + value_width) + self.rows * (width + self.keys)
        return numbers * shape.dtype.itemsize + 32 * self.keys


def tile_config(shape: AttentionShape, shared_bytes: int = _LEAST_SHARED_BYTES) -> TileConfig:
    """The tile for a model on a device: two buffers if they fit, if need be of fewer keys, else one buffer.

    Args:
        shape: Of the model. Tests may make one with short segments, which bound the keys of a tile.
        shared_bytes: What a program may have of the device.
    """
    configs = [
        TileConfig(config.rows, min(config.keys, shape.segment_length), config.num_warps, config.num_stages)
        for config in _configs(shape)
    ]
    return next((config for config in configs if config.shared_bytes(shape) <= shared_bytes), configs[-1])


def _configs(shape: AttentionShape) -> list[TileConfig]:
    """Best first. With other numbers of warps, or more keys, some spill on compute capability 8.0, 9.0 or 10.0."""
    rows = max(32, int(triton.next_power_of_2(shape.group)))
    widest = max(_padded(shape.head_dim), _padded(shape.value_dim))
    if shape.dtype == torch.float32:
        return [TileConfig(rows, 16, 4 if widest <= 128 else 8, stages) for stages in (_TWO_BUFFERS, _ONE_BUFFER)]
    most_keys = 128 if widest <= 64 else 64 if widest <= 128 else 32
    return [
        TileConfig(rows, most_keys, 8, _TWO_BUFFERS),
        TileConfig(rows, most_keys // 2, 8, _TWO_BUFFERS),
        TileConfig(rows, most_keys, 8, _ONE_BUFFER),
    ]


def _launch_options(is_dependent: bool) -> dict[str, bool]:
    """Of every kernel here."""
    return {"WAITS": True, "launch_pdl": True} if is_dependent else {"WAITS": False}


def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that a program may have on a device; what all GPUs have where there is none."""
    if device.type != "cuda":
        return _LEAST_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def _padded(dim: int) -> int:
    """Products want powers of two, and at least 16."""
    return max(16, int(triton.next_power_of_2(dim)))


@triton.jit
def _segment_start(segment, LENGTH: tl.constexpr):
    middle = 8 * LENGTH + (segment - 8) * (2 * LENGTH)
    far = 32 * LENGTH + (segment - 20) * (4 * LENGTH)
    return tl.where(segment < 8, segment * LENGTH, tl.where(segment < 20, middle, far))


@triton.jit
def _num_segments(num_keys, LENGTH: tl.constexpr):
    near = (num_keys + (LENGTH - 1)) // LENGTH
    middle = 8 + (num_keys - 8 * LENGTH + (2 * LENGTH - 1)) // (2 * LENGTH)
    far = 20 + (num_keys - 32 * LENGTH + (4 * LENGTH - 1)) // (4 * LENGTH)
    return tl.where(num_keys <= 8 * LENGTH, near, tl.where(num_keys <= 32 * LENGTH, middle, far))


@triton.jit(do_not_specialize=["num_spans", "num_tokens"])  # one version for every step
def _make_tiles(
    span_row, span_start, span_count, tile_span, tile_token, tile_size, token_tile, count_of_tiles,
    num_spans, num_tokens,
    PER_TILE: tl.constexpr, PER_TILE_PADDED: tl.constexpr, SPANS: tl.constexpr, TOKENS: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """One program: the tiles of all spans, and for each token that of its own."""
    if WAITS:
        gdc_wait()
    token = tl.arange(0, TOKENS)
    tl.store(token_tile + token, -1, mask=token < num_tokens)
    tl.debug_barrier()
    s = tl.arange(0, SPANS)
    is_there = s < num_spans
    is_there = is_there & (tl.load(span_row + s, mask=is_there, other=-1) >= 0)
    start = tl.load(span_start + s, mask=is_there, other=0)
    count = tl.load(span_count + s, mask=is_there, other=0)
    tiles = (count + (PER_TILE - 1)) // PER_TILE
    base = tl.cumsum(tiles, 0) - tiles
    slot = tl.arange(0, PER_TILE_PADDED)
    for k in range(tl.max(tiles, 0)):
        is_tile = k < tiles
        tile = base + k
        size = tl.minimum(count - k * PER_TILE, PER_TILE)
        tl.store(tile_span + tile, s, mask=is_tile)
        tl.store(tile_token + tile, start + k * PER_TILE, mask=is_tile)
        tl.store(tile_size + tile, size, mask=is_tile)
        at = (start + k * PER_TILE)[:, None] + slot[None, :]
        value = tile[:, None] + tl.zeros_like(at)
        tl.store(token_tile + at, value, mask=is_tile[:, None] & (slot[None, :] < size[:, None]))
    tl.store(count_of_tiles, tl.sum(tiles, 0))


@triton.jit
def _make_items(
    tile_token, tile_size, count_of_tiles, place, position,
    tile_part, tile_parts, item_tile, item_low, item_high, item_part, count_of_items,
    window, split_below,
    KV_HEADS: tl.constexpr, PER_TILE: tl.constexpr, TILES: tl.constexpr, LENGTH: tl.constexpr,
    HAS_WINDOW: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One program: what there is to do for one window; and for each tile where its partial results are.

    An item's partial results begin at ``item_part``, -1 for none; those of a tile's first item are one. So the others'
    places follow from their first segments.
    """
    if WAITS:
        gdc_wait()
    num_tiles = tl.load(count_of_tiles)
    t = tl.arange(0, TILES)
    is_there = t < num_tiles
    first = tl.load(tile_token + t, mask=is_there, other=0)
    size = tl.load(tile_size + t, mask=is_there, other=0)
    end = tl.zeros([TILES], tl.int32)
    begin = tl.full([TILES], 2147483647, tl.int32)
    for i in range(PER_TILE):
        inside = is_there & (i < size)
        end = tl.maximum(end, tl.load(place + first + i, mask=inside, other=-1) + 1)
        begin = tl.minimum(begin, tl.load(position + first + i, mask=inside, other=2147483647))
    low = tl.zeros([TILES], tl.int32)
    if HAS_WINDOW:
        oldest = tl.maximum(tl.where(is_there, begin, 0) - window + 1, 0)
        low = _num_segments(oldest + 1, LENGTH) - 1
    high = _num_segments(end, LENGTH)
    segments = tl.where(is_there, tl.maximum(high - low, 1), 0)
    # No program has much more to do than its share, however long its tile is.
    share = (tl.sum(segments, 0) * KV_HEADS + split_below - 1) // split_below
    share = tl.maximum(share, 1)
    parts = tl.where(segments > share, segments - share + 1, 0)
    part = tl.cumsum(parts, 0) - parts
    items = (segments + share - 1) // share
    base = tl.cumsum(items, 0) - items
    tl.store(tile_part + t, part, mask=is_there)
    tl.store(tile_parts + t, parts, mask=is_there)
    for k in range(tl.max(items, 0)):
        is_item = k < items
        tl.store(item_tile + base + k, t, mask=is_item)
        tl.store(item_low + base + k, low + k * share, mask=is_item)
        tl.store(item_high + base + k, tl.minimum(low + (k + 1) * share, high), mask=is_item)
        of_item = part + tl.where(k > 0, 1 + (k - 1) * share, 0)
        tl.store(item_part + base + k, tl.where(parts > 0, of_item, -1), mask=is_item)
    tl.store(count_of_items, tl.sum(items, 0))


@triton.jit
def _finite(top):
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _attend(
    out, part, part_top, part_sum, q, k_pool, v_pool, table, sinks,
    count_of_items, item_tile, item_low, item_high, item_part, tile_part, tile_span, tile_token, tile_size, span_row,
    place, position, tree_first, tree_word,
    score_factor, cap, window,
    q_token, q_head, out_token, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    DV: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PROGRAMS: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Items times key heads, shared out among the programs."""
    if WAITS:
        gdc_wait()
    num_work = tl.load(count_of_items) * KV_HEADS
    m = tl.arange(0, ROWS)
    d = tl.arange(0, D_PADDED)
    dv = tl.arange(0, DV_PADDED)
    for work in range(tl.program_id(0), num_work, PROGRAMS):
        item = work // KV_HEADS
        head = work % KV_HEADS
        tile = tl.load(item_tile + item)
        low = tl.load(item_low + item)
        high = tl.load(item_high + item)
        part_of = tl.load(item_part + item)
        is_further = part_of > tl.load(tile_part + tile)
        row = tl.load(span_row + tl.load(tile_span + tile))
        token = tl.load(tile_token + tile) + m // GROUP
        is_live = (m // GROUP) < tl.load(tile_size + tile)
        query_head = head * GROUP + m % GROUP
        at = tl.load(place + token, mask=is_live, other=-1)
        end = tl.max(at, 0) + 1
        from_q = token.to(tl.int64) * q_token + query_head * q_head
        x = tl.load(q + from_q[:, None] + d[None, :], mask=is_live[:, None] & (d < D)[None, :], other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
        oldest = 0
        if HAS_WINDOW:
            after = tl.load(position + token, mask=is_live, other=2147483647) - window
            oldest = tl.maximum(tl.min(after, 0) + 1, 0)
        if HAS_TREE:
            first = tl.load(tree_first + token, mask=is_live, other=0)
            word = tl.load(tree_word + token, mask=is_live, other=0)
        run_top = tl.full([ROWS], float("-inf"), tl.float32)
        run_sum = tl.zeros([ROWS], tl.float32)
        run = tl.zeros([ROWS, DV_PADDED], tl.float32)
        for segment in range(low, high):
            start = _segment_start(segment, LENGTH)
            stop = tl.minimum(_segment_start(segment + 1, LENGTH), end)
            # Tiles that no token of this one reads would add nothing.
            start = tl.maximum(start, oldest // KEYS * KEYS)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
            for n0 in range(start, stop, KEYS):
                key = n0 + tl.arange(0, KEYS)
                is_key = (key < stop) & (key >= oldest)
                block = tl.load(table + row.to(tl.int64) * table_row + key // BLOCK, mask=is_key, other=0).to(tl.int64)
                from_k = block * k_block + (key % BLOCK) * k_slot + head * k_head
                k = tl.load(k_pool + from_k[None, :] + d[:, None], mask=is_key[None, :] & (d < D)[:, None], other=0.0)
                if WIDEN:
                    k = k.to(tl.float32)
                scores = tl.dot(x, k, input_precision="ieee") * score_factor
                if HAS_CAP:
                    scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * cap
                allowed = (key[None, :] <= at[:, None]) & is_key[None, :]
                if HAS_TREE:
                    step = key[None, :] - first[:, None]
                    shift = tl.minimum(tl.maximum(step, 0), 63).to(tl.int64)
                    allowed = allowed & ((step < 0) | (((word[:, None] >> shift) & 1) == 1))
                    if HAS_WINDOW:
                        allowed = allowed & ((key[None, :] > after[:, None]) | (step >= 0))
                elif HAS_WINDOW:
                    allowed = allowed & (key[None, :] > after[:, None])
                scores = tl.where(allowed, scores, float("-inf"))
                largest = tl.maximum(top, tl.max(scores, 1))
                finite = _finite(largest)
                weights = tl.exp2(scores - finite[:, None])
                fade = tl.exp2(top - finite)
                from_v = block * v_block + (key % BLOCK) * v_slot + head * v_head
                v = tl.load(
                    v_pool + from_v[:, None] + dv[None, :], mask=is_key[:, None] & (dv < DV)[None, :], other=0.0
                )
                weights_v = weights.to(v.dtype)
                if WIDEN:
                    weights_v = weights_v.to(tl.float32)
                    v = v.to(tl.float32)
                total = total * fade + tl.sum(weights, 1)
                acc = tl.dot(weights_v, v, acc * fade[:, None], input_precision="ieee")
                top = largest
            largest = tl.maximum(run_top, top)
            finite = _finite(largest)
            a = tl.exp2(run_top - finite)
            b = tl.exp2(top - finite)
            run_sum = run_sum * a + total * b
            run = run * a[:, None] + acc * b[:, None]
            run_top = largest
            if (part_of >= 0) & (is_further | (segment == high - 1)):
                of_segment = part_of + tl.where(is_further, segment - low, 0)
                to = (of_segment.to(tl.int64) * KV_HEADS + head) * ROWS + m
                tl.store(part_top + to, run_top, mask=is_live)
                tl.store(part_sum + to, run_sum, mask=is_live)
                tl.store(part + to[:, None] * DV_PADDED + dv[None, :], run, mask=is_live[:, None])
                run_top = tl.full([ROWS], float("-inf"), tl.float32)
                run_sum = tl.zeros([ROWS], tl.float32)
                run = tl.zeros([ROWS, DV_PADDED], tl.float32)
        if part_of < 0:
            if HAS_SINKS:
                sink = tl.load(sinks + query_head, mask=is_live, other=0.0).to(tl.float32) * 1.4426950408889634
                largest = tl.maximum(run_top, sink)
                fade = tl.exp2(run_top - largest)
                run_sum = run_sum * fade + tl.exp2(sink - largest)
                run = run * fade[:, None]
            result = run / run_sum[:, None]
            to = token.to(tl.int64) * out_token + query_head * DV
            mask = is_live[:, None] & (dv < DV)[None, :]
            tl.store(out + to[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge(
    out, part, part_top, part_sum, sinks, token_tile, tile_part, tile_parts, tile_token, out_token,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, DV: tl.constexpr,
    DV_PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A program for each token and key head: the segments in order, then the sink; zeros for padding."""
    if WAITS:
        gdc_wait()
    token = tl.program_id(0)
    head = tl.program_id(1)
    g = tl.arange(0, GROUP_PADDED)
    dv = tl.arange(0, DV_PADDED)
    query_head = head * GROUP + g
    is_live = g < GROUP
    to = token.to(tl.int64) * out_token + query_head * DV
    mask = is_live[:, None] & (dv < DV)[None, :]
    tile = tl.load(token_tile + token)
    if tile < 0:
        zeros = tl.zeros([GROUP_PADDED, DV_PADDED], tl.float32)
        tl.store(out + to[:, None] + dv[None, :], zeros.to(out.dtype.element_ty), mask=mask)
        return
    parts = tl.load(tile_parts + tile)
    if parts == 0:
        return
    run_top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    run_sum = tl.zeros([GROUP_PADDED], tl.float32)
    run = tl.zeros([GROUP_PADDED, DV_PADDED], tl.float32)
    base = tl.load(tile_part + tile)
    rows = (token - tl.load(tile_token + tile)) * GROUP + g
    for i in range(parts):
        at = ((base + i).to(tl.int64) * KV_HEADS + head) * ROWS + rows
        top = tl.load(part_top + at, mask=is_live, other=float("-inf"))
        total = tl.load(part_sum + at, mask=is_live, other=0.0)
        acc = tl.load(part + at[:, None] * DV_PADDED + dv[None, :], mask=is_live[:, None], other=0.0)
        largest = tl.maximum(run_top, top)
        finite = _finite(largest)
        a = tl.exp2(run_top - finite)
        b = tl.exp2(top - finite)
        run_sum = run_sum * a + total * b
        run = run * a[:, None] + acc * b[:, None]
        run_top = largest
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=is_live, other=0.0).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(run_top, sink)
        fade = tl.exp2(run_top - largest)
        run_sum = run_sum * fade + tl.exp2(sink - largest)
        run = run * fade[:, None]
    result = run / run_sum[:, None]
    tl.store(out + to[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _write_cache(
    k, v, k_pool, v_pool, slots,
    k_token, k_from_head, k_from_dim, v_token, v_from_head, v_from_dim,
    k_block, k_slot, k_head, v_block, v_slot, v_head,
    KV_HEADS: tl.constexpr, KV_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    DV: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A program for each token."""
    if WAITS:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK
    place = slot % BLOCK
    h = tl.arange(0, KV_PADDED)[:, None]
    d = tl.arange(0, D_PADDED)[None, :]
    mask = (h < KV_HEADS) & (d < D)
    values = tl.load(k + token * k_token + h * k_from_head + d * k_from_dim, mask=mask)
    tl.store(k_pool + block * k_block + place * k_slot + h * k_head + d, values, mask=mask)
    dv = tl.arange(0, DV_PADDED)[None, :]
    mask = (h < KV_HEADS) & (dv < DV)
    values = tl.load(v + token * v_token + h * v_from_head + dv * v_from_dim, mask=mask)
    tl.store(v_pool + block * v_block + place * v_slot + h * v_head + dv, values, mask=mask)


def write_cache(
    keys: Tensor,
    values: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    dependent_launches: bool = False,
) -> None:
    """Write a layer's keys and values of a step into their slots, in one launch.

    Args:
        keys: [T, H_kv, D], any strides.
        values: [T, H_kv, D_v], any strides.
        key_pool: [blocks, block size, H_kv, D], changed in place.
        value_pool: [blocks, block size, H_kv, D_v], changed in place.
        slots: int32 or int64 [T], block times block size plus the place in it; a token with a negative slot is not
            written. Tokens that share a slot, as padding does, leave either one's numbers there.
        dependent_launches: See :class:`TritonAttention`.
    """
    assert key_pool.stride(3) == value_pool.stride(3) == 1, "heads are contiguous"
    num_tokens, kv_heads, dim = keys.shape
    value_dim = values.shape[2]
    _write_cache[(num_tokens,)](
        keys, values, key_pool, value_pool, slots,
        *keys.stride(), *values.stride(), *key_pool.stride()[:3], *value_pool.stride()[:3],
        KV_HEADS=kv_heads, KV_PADDED=triton.next_power_of_2(kv_heads), D=dim, D_PADDED=triton.next_power_of_2(dim),
        DV=value_dim, DV_PADDED=triton.next_power_of_2(value_dim), BLOCK=key_pool.shape[1], num_warps=4,
        **_launch_options(dependent_launches),
    )  # fmt: skip


class _WorkList:
    """The items of a step for one window."""

    def __init__(self, num_tiles: int, num_items: int, device: torch.device) -> None:
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.tile_part, self.tile_parts = torch.zeros(2, num_tiles, dtype=torch.int32, device=device).unbind()
        items = torch.zeros(4, num_items, dtype=torch.int32, device=device)
        self.item_tile, self.item_low, self.item_high, self.item_part = items.unbind()


def _most_parts(num_segments: int, num_tiles: int, kv_heads: int, split_below: int) -> int:
    """Most partial results of a step for one key head.

    Of k tiles that are split each has at most all n segments, and all but the first item's share of them are kept. The
    share is at least k * n * kv_heads / split_below. So fewer than split_below / kv_heads tiles are split.
    """
    counts = range(1, min(num_tiles, split_below // kv_heads) + 1)
    return max(
        (k * (num_segments + 1) - max(k, k * k * num_segments * kv_heads // split_below) for k in counts), default=0
    )


class TritonAttention:
    """See :class:`~specdec.kernels.segmented.AttentionKernel`: captured in a graph, it serves every later step.

    Args:
        shape: Of the model.
        device: A GPU; or the CPU under Triton's interpreter.
        config: The tile; by default that of the shape and the device.
        num_processors: Streaming multiprocessors; by default the device's.
        split_below: Steps of fewer items times key heads are split into so many, as far as they have as many segments;
            by default two for each processor. 0 splits none.
        dependent_launches: Launch each kernel while the one before it still runs; from compute capability 9.0 on.

    Raises:
        ValueError: head_dim or value_dim is more than 256.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        config: TileConfig | None = None,
        num_processors: int | None = None,
        split_below: int | None = None,
        dependent_launches: bool = False,
    ) -> None:
        if max(shape.head_dim, shape.value_dim) > 256:
            raise ValueError(f"head_dim and value_dim must be at most 256: {shape.head_dim}, {shape.value_dim}")
        if num_processors is None:
            is_cuda = device.type == "cuda"
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
        self._shape, self._device = shape, device
        self._launch = _launch_options(dependent_launches)
        self._config = config or tile_config(shape, shared_bytes_of(device))
        self._per_tile = self._config.rows // shape.group
        self._programs = _PROGRAMS_PER_PROCESSOR * num_processors
        self._split_below = max(1, 2 * num_processors if split_below is None else split_below)
        kv_heads = shape.num_kv_heads
        self._max_spans = shape.max_rows + 1
        self._max_tiles = shape.max_tokens // self._per_tile + shape.max_rows
        most_segments = num_segments(shape.max_length, shape.segment_length)
        num_parts = _most_parts(most_segments, self._max_tiles, kv_heads, self._split_below)
        self._max_items = self._max_tiles + min(self._split_below // kv_heads + 1, num_parts)
        num_parts = max(1, num_parts) * kv_heads * self._config.rows
        self._part = torch.empty(num_parts, _padded(shape.value_dim), dtype=torch.float32, device=device)
        self._part_top, self._part_sum = torch.empty(2, num_parts, dtype=torch.float32, device=device).unbind()
        tiles = torch.zeros(3, self._max_tiles, dtype=torch.int32, device=device)
        self._tile_span, self._tile_token, self._tile_size = tiles.unbind()
        self._token_tile = torch.full((shape.max_tokens,), -1, dtype=torch.int32, device=device)
        self._num_tiles = torch.zeros(1, dtype=torch.int32, device=device)
        self._lists: dict[int | None, _WorkList] = {}
        self._listed: set[int | None] = set()
        self._step: AttentionStep | None = None
        # numpy holds no bfloat16, and the interpreter would multiply its bits.
        self._widen = device.type == "cpu" and shape.dtype == torch.bfloat16

    @property
    def slow_reason(self) -> str:
        """What this device's shared memory keeps from being fast; empty if nothing."""
        best = tile_config(self._shape, sys.maxsize)
        if self._config == best or not best.has_two_buffers:
            return ""
        kib = shared_bytes_of(self._device) >> 10
        how = f"{self._config.keys} keys at a time" if self._config.has_two_buffers else "one buffer"
        return f"attention reads keys with {how}: a program may have {kib} KiB of shared memory"

    def prepare(self, step: AttentionStep) -> None:
        """See :meth:`AttentionKernel.prepare`."""
        num_spans, num_tokens = len(step.span_row), len(step.row)
        assert num_spans <= self._max_spans, "more rows than the shape says"
        assert num_tokens <= self._shape.max_tokens, "more tokens than the shape says"
        self._step, self._listed = step, set()
        _make_tiles[(1,)](
            step.span_row, step.span_start, step.span_count,
            self._tile_span, self._tile_token, self._tile_size, self._token_tile, self._num_tiles,
            num_spans, num_tokens,
            PER_TILE=self._per_tile, PER_TILE_PADDED=triton.next_power_of_2(self._per_tile),
            SPANS=triton.next_power_of_2(self._max_spans), TOKENS=triton.next_power_of_2(self._shape.max_tokens),
            num_warps=8, **self._launch,
        )  # fmt: skip

    def attend(self, queries: Tensor, key_pool: Tensor, value_pool: Tensor, layer: AttentionLayer) -> Tensor:
        """See :meth:`AttentionKernel.attend`."""
        step, shape, config = self._step, self._shape, self._config
        assert step is not None, "prepare comes first"
        assert queries.stride(2) == key_pool.stride(3) == value_pool.stride(3) == 1, "heads are contiguous"
        work, kv_heads, value_dim = self._work(step, layer.window), shape.num_kv_heads, shape.value_dim
        out = torch.empty(len(queries), shape.num_heads, value_dim, dtype=queries.dtype, device=self._device)
        factor, cap = layer.scaling * _LOG2_E, 0.0
        if layer.softcap is not None:
            factor, cap = layer.scaling / layer.softcap * 2 * _LOG2_E, layer.softcap * _LOG2_E
        sinks = self._part_top if layer.sinks is None else layer.sinks
        parts = self._part, self._part_top, self._part_sum
        _attend[(self._programs,)](
            out, *parts, queries, key_pool, value_pool, step.block_table, sinks,
            work.count, work.item_tile, work.item_low, work.item_high, work.item_part, work.tile_part,
            self._tile_span, self._tile_token, self._tile_size, step.span_row,
            step.place, step.position, step.tree_first, step.tree_word,
            factor, cap, layer.window or 0,
            queries.stride(0), queries.stride(1), out.stride(0), *key_pool.stride()[:3], *value_pool.stride()[:3],
            step.block_table.stride(0),
            KV_HEADS=kv_heads, GROUP=shape.group, D=shape.head_dim, D_PADDED=_padded(shape.head_dim),
            DV=value_dim, DV_PADDED=_padded(value_dim), BLOCK=shape.block_size, LENGTH=shape.segment_length,
            ROWS=config.rows, KEYS=config.keys, PROGRAMS=self._programs,
            HAS_TREE=shape.has_trees, HAS_WINDOW=layer.window is not None, HAS_CAP=layer.softcap is not None,
            HAS_SINKS=layer.sinks is not None, WIDEN=self._widen,
            num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
            **self._launch,
        )  # fmt: skip
        _merge[(len(queries), kv_heads)](
            out, *parts, sinks, self._token_tile, work.tile_part, work.tile_parts, self._tile_token, out.stride(0),
            KV_HEADS=kv_heads, GROUP=shape.group, GROUP_PADDED=triton.next_power_of_2(shape.group), DV=value_dim,
            DV_PADDED=_padded(value_dim), ROWS=config.rows, HAS_SINKS=layer.sinks is not None,
            num_warps=4, enable_fp_fusion=False, **self._launch,
        )  # fmt: skip
        return out

    def _work(self, step: AttentionStep, window: int | None) -> _WorkList:
        """The step's items for a window, listed by its first layer."""
        work = self._lists.get(window)
        if work is None:
            work = self._lists[window] = _WorkList(self._max_tiles, self._max_items, self._device)
        if window not in self._listed:
            self._listed.add(window)
            _make_items[(1,)](
                self._tile_token, self._tile_size, self._num_tiles, step.place, step.position,
                work.tile_part, work.tile_parts, work.item_tile, work.item_low, work.item_high, work.item_part,
                work.count, window or 0, self._split_below,
                KV_HEADS=self._shape.num_kv_heads, PER_TILE=self._per_tile,
                TILES=triton.next_power_of_2(self._max_tiles), LENGTH=self._shape.segment_length,
                HAS_WINDOW=window is not None, num_warps=8, **self._launch,
            )  # fmt: skip
        return work
