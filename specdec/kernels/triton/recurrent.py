"""Recurrent layers as Triton kernels: short convolutions, the gated delta rule, Mamba-1 and Mamba-2.

A scan's program has a part of one row's state in registers. It scans again what the row has kept since its window's
beginning, if the row was cut back, then the new tokens: one launch for a layer. ``_keep`` then writes the step's inputs
into the rings, as other programs may still read them before.

All tokens go through the same operations in the same order, one by one, whether they are new or kept: a state does not
depend on how tokens came in steps, or were drafted and taken back. Products and sums are not contracted for that
(``enable_fp_fusion=False``). The rules are those of :mod:`specdec.kernels.scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.recurrent import KeptStates, StateTensors
from specdec.kernels.scan import DeltaRule, Mamba1, Mamba2, Scan

_STATE_NUMBERS = 1024
"""Of a state, in a program of one warp: more would spill, and several warps would have to meet at every token."""
_CHANNELS = 256
_MAX_INPUTS = 4


@triton.jit
def _row(at, row):
    """Slot, first token, tokens, tokens before, where the window begins after the step, and where the scan begins.

    The first state is moved by scanning again where its new place is before the new tokens.
    """
    slot, start, count, length, oldest, newest, oldest_after = at
    slot, start, count = tl.load(slot + row).to(tl.int64), tl.load(start + row), tl.load(count + row)
    length, oldest = tl.load(length + row), tl.load(oldest + row)
    newest, oldest_after = tl.load(newest + row), tl.load(oldest_after + row)
    is_again = (newest != length) | ((oldest < oldest_after) & (oldest_after < length))
    return slot, start, count, length, oldest_after, tl.where(is_again, oldest, length), is_again


@triton.jit
def _delta_step(state, key, value, decay, beta, NORMALIZED: tl.constexpr):
    if NORMALIZED:
        key = key * tl.math.rsqrt(tl.sum(key * key, 0) + 1e-6)
    state = state * tl.exp(decay)
    change = (value - tl.sum(state * key[None, :], 1)) * beta
    return state + change[:, None] * key[None, :]


@triton.jit
def _delta_rule(
    out, first, last, query, key, value, decay, beta, kept_key, kept_value, kept_decay, kept_beta,
    at_slot, at_start, at_count, at_length, at_oldest, at_newest, at_oldest_after,
    scale, query_token, query_head, key_token, key_head, value_token, value_head, decay_token, decay_head, beta_token,
    SIZE: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr,
    DV: tl.constexpr, ROWS: tl.constexpr, BY_CHANNEL: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """One program for each row, value head, and ``ROWS`` of the state's value dimensions."""
    at = (at_slot, at_start, at_count, at_length, at_oldest, at_newest, at_oldest_after)
    head, v = tl.program_id(1), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    slot, start, count, length, oldest_after, begin, is_again = _row(at, tl.program_id(0))
    if count == 0:
        return
    k = tl.arange(0, DK_PADDED)
    has_k, has_v = k < DK, v < DV
    has = has_v[:, None] & has_k[None, :]
    to = (slot * HEADS + head) * DK * DV + k[None, :] * DV + v[:, None]
    key_of = head // (HEADS // KEY_HEADS)
    state = tl.load(tl.where(is_again, first, last) + to, mask=has & (begin > 0), other=0.0)
    for position in range(begin, length):
        if position == oldest_after:
            tl.store(first + to, state, mask=has)
        entry = slot * SIZE + position % SIZE
        one_key = tl.load(kept_key + (entry * KEY_HEADS + key_of) * DK + k, mask=has_k, other=0.0).to(tl.float32)
        one_value = tl.load(kept_value + (entry * HEADS + head) * DV + v, mask=has_v, other=0.0).to(tl.float32)
        if BY_CHANNEL:
            one_decay = tl.load(kept_decay + (entry * HEADS + head) * DK + k, mask=has_k, other=0.0)[None, :]
        else:
            one_decay = tl.load(kept_decay + entry * HEADS + head)
        one_beta = tl.load(kept_beta + entry * HEADS + head).to(tl.float32)
        state = _delta_step(state, one_key, one_value, one_decay.to(tl.float32), one_beta, NORMALIZED)
    for i in range(count):
        if length + i == oldest_after:
            tl.store(first + to, state, mask=has)
        t = (start + i).to(tl.int64)
        one_key = tl.load(key + t * key_token + key_of * key_head + k, mask=has_k, other=0.0).to(tl.float32)
        one_value = tl.load(value + t * value_token + head * value_head + v, mask=has_v, other=0.0).to(tl.float32)
        one_query = tl.load(query + t * query_token + key_of * query_head + k, mask=has_k, other=0.0).to(tl.float32)
        if BY_CHANNEL:
            one_decay = tl.load(decay + t * decay_token + head * decay_head + k, mask=has_k, other=0.0)[None, :]
        else:
            one_decay = tl.load(decay + t * decay_token + head)
        one_beta = tl.load(beta + t * beta_token + head).to(tl.float32)
        state = _delta_step(state, one_key, one_value, one_decay.to(tl.float32), one_beta, NORMALIZED)
        if NORMALIZED:
            one_query = one_query * tl.math.rsqrt(tl.sum(one_query * one_query, 0) + 1e-6)
        read = tl.sum(state * (one_query * scale)[None, :], 1)
        tl.store(out + (t * HEADS + head) * DV + v, read.to(out.dtype.element_ty), mask=has_v)
    tl.store(last + to, state, mask=has)


@triton.jit
def _mamba_step(state, x, time, rates, b):
    return state * tl.exp(rates * time) + (x * time)[:, None] * b[None, :]


@triton.jit
def _mamba2(
    out, first, last, x, time, b, c, kept_x, kept_time, kept_b, rates, skip,
    at_slot, at_start, at_count, at_length, at_oldest, at_newest, at_oldest_after,
    x_token, x_head, time_token, b_token, b_group, c_token, c_group,
    SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATES: tl.constexpr,
    STATES_PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """One program for each row, head, and ``ROWS`` of the head's dimensions."""
    at = (at_slot, at_start, at_count, at_length, at_oldest, at_newest, at_oldest_after)
    head, p = tl.program_id(1), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    slot, start, count, length, oldest_after, begin, is_again = _row(at, tl.program_id(0))
    if count == 0:
        return
    s = tl.arange(0, STATES_PADDED)
    has_p, has_s = p < DIM, s < STATES
    has = has_p[:, None] & has_s[None, :]
    to = ((slot * HEADS + head) * DIM + p[:, None]) * STATES + s[None, :]
    group = head // (HEADS // GROUPS)
    rate = tl.load(rates + head).to(tl.float32)
    state = tl.load(tl.where(is_again, first, last) + to, mask=has & (begin > 0), other=0.0)
    for position in range(begin, length):
        if position == oldest_after:
            tl.store(first + to, state, mask=has)
        entry = slot * SIZE + position % SIZE
        one_x = tl.load(kept_x + (entry * HEADS + head) * DIM + p, mask=has_p, other=0.0).to(tl.float32)
        one_b = tl.load(kept_b + (entry * GROUPS + group) * STATES + s, mask=has_s, other=0.0).to(tl.float32)
        state = _mamba_step(state, one_x, tl.load(kept_time + entry * HEADS + head).to(tl.float32), rate, one_b)
    for i in range(count):
        if length + i == oldest_after:
            tl.store(first + to, state, mask=has)
        t = (start + i).to(tl.int64)
        one_x = tl.load(x + t * x_token + head * x_head + p, mask=has_p, other=0.0).to(tl.float32)
        one_b = tl.load(b + t * b_token + group * b_group + s, mask=has_s, other=0.0).to(tl.float32)
        state = _mamba_step(state, one_x, tl.load(time + t * time_token + head).to(tl.float32), rate, one_b)
        one_c = tl.load(c + t * c_token + group * c_group + s, mask=has_s, other=0.0).to(tl.float32)
        read = tl.sum(state * one_c[None, :], 1)
        if HAS_SKIP:
            read += one_x * tl.load(skip + head).to(tl.float32)
        tl.store(out + (t * HEADS + head) * DIM + p, read.to(out.dtype.element_ty), mask=has_p)
    tl.store(last + to, state, mask=has)


@triton.jit
def _mamba1(
    out, first, last, x, time, b, c, gate, kept_x, kept_time, kept_b, rates, skip,
    at_slot, at_start, at_count, at_length, at_oldest, at_newest, at_oldest_after,
    x_token, time_token, b_token, c_token, gate_token,
    SIZE: tl.constexpr, DIM: tl.constexpr, STATES: tl.constexpr, STATES_PADDED: tl.constexpr, ROWS: tl.constexpr,
    HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """One program for each row and ``ROWS`` of the channels."""
    at = (at_slot, at_start, at_count, at_length, at_oldest, at_newest, at_oldest_after)
    d = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot, start, count, length, oldest_after, begin, is_again = _row(at, tl.program_id(0))
    if count == 0:
        return
    s = tl.arange(0, STATES_PADDED)
    has_d, has_s = d < DIM, s < STATES
    has = has_d[:, None] & has_s[None, :]
    of_state = d[:, None] * STATES + s[None, :]
    to = slot * DIM * STATES + of_state
    rate = tl.load(rates + of_state, mask=has, other=0.0).to(tl.float32)
    state = tl.load(tl.where(is_again, first, last) + to, mask=has & (begin > 0), other=0.0)
    for position in range(begin, length):
        if position == oldest_after:
            tl.store(first + to, state, mask=has)
        entry = slot * SIZE + position % SIZE
        one_x = tl.load(kept_x + entry * DIM + d, mask=has_d, other=0.0).to(tl.float32)
        one_time = tl.load(kept_time + entry * DIM + d, mask=has_d, other=0.0).to(tl.float32)
        one_b = tl.load(kept_b + entry * STATES + s, mask=has_s, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * one_time[:, None]) + (one_x * one_time)[:, None] * one_b[None, :]
    for i in range(count):
        if length + i == oldest_after:
            tl.store(first + to, state, mask=has)
        t = (start + i).to(tl.int64)
        one_x = tl.load(x + t * x_token + d, mask=has_d, other=0.0).to(tl.float32)
        one_time = tl.load(time + t * time_token + d, mask=has_d, other=0.0).to(tl.float32)
        one_b = tl.load(b + t * b_token + s, mask=has_s, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * one_time[:, None]) + (one_x * one_time)[:, None] * one_b[None, :]
        one_c = tl.load(c + t * c_token + s, mask=has_s, other=0.0).to(tl.float32)
        read = tl.sum(state * one_c[None, :], 1)
        if HAS_SKIP:
            read += one_x * tl.load(skip + d, mask=has_d, other=0.0).to(tl.float32)
        if HAS_GATE:
            one_gate = tl.load(gate + t * gate_token + d, mask=has_d, other=0.0).to(tl.float32)
            read = read * one_gate * tl.sigmoid(one_gate)
        tl.store(out + t * DIM + d, read.to(out.dtype.element_ty), mask=has_d)
    tl.store(last + to, state, mask=has)


@triton.jit
def _convolve(
    out, inputs, ring, weight, bias, token_slot, token_index, token_position, token_stride, channel_stride,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    """One program for each token and ``BLOCK`` channels."""
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has = channel < CHANNELS
    slot = tl.load(token_slot + t).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    if slot >= 0:
        index, position = tl.load(token_index + t), tl.load(token_position + t)
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            new = inputs + (t - back) * token_stride + channel * channel_stride
            one = tl.load(new, mask=has & (index >= back), other=0.0).to(tl.float32)
            # Before its beginning a sequence has inputs of zero.
            is_kept = has & (index < back) & (position >= back)
            old = ring + (slot * SIZE + (position - back) % SIZE) * CHANNELS + channel
            one += tl.load(old, mask=is_kept, other=0.0).to(tl.float32)
            total += one * tl.load(weight + channel * TAPS + tap, mask=has, other=0.0).to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=has, other=0.0).to(tl.float32)
        if HAS_SILU:
            total = total * tl.sigmoid(total)
    tl.store(out + t * CHANNELS + channel, total.to(out.dtype.element_ty), mask=has)


@triton.jit
def _keep_one(pool, values, stride, t, entry, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for at in range(0, WIDTH, BLOCK):
        i = at + tl.arange(0, BLOCK)
        value = tl.load(values + t * stride + i, mask=i < WIDTH, other=0.0)
        tl.store(pool + entry * WIDTH + i, value.to(pool.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _keep(
    pool_0, pool_1, pool_2, pool_3, values_0, values_1, values_2, values_3, stride_0, stride_1, stride_2, stride_3,
    token_slot, token_position, token_left,
    SIZE: tl.constexpr, WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, WIDTH_3: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each token: what it brings, into the rings; of a long row the last tokens alone."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slot + t).to(tl.int64)
    if (slot >= 0) & (tl.load(token_left + t) <= SIZE):
        entry = slot * SIZE + tl.load(token_position + t) % SIZE
        _keep_one(pool_0, values_0, stride_0, t, entry, WIDTH_0, BLOCK)
        _keep_one(pool_1, values_1, stride_1, t, entry, WIDTH_1, BLOCK)
        _keep_one(pool_2, values_2, stride_2, t, entry, WIDTH_2, BLOCK)
        _keep_one(pool_3, values_3, stride_3, t, entry, WIDTH_3, BLOCK)


def convolve(
    inputs: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, at: StateTensors
) -> Tensor:
    """See :meth:`specdec.kernels.recurrent.RecurrentKernels.convolve`."""
    assert activation in (None, "silu", "swish"), activation
    _, channels, num_tokens = inputs.shape
    weight = weight.contiguous()
    out = torch.empty(num_tokens, channels, dtype=inputs.dtype, device=inputs.device)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    with torch.cuda.device_of(inputs):
        _convolve[(num_tokens, triton.cdiv(channels, block))](
            out, inputs, ring, weight, weight if bias is None else bias,
            at.token_slot, at.token_index, at.token_position, inputs.stride(2), inputs.stride(1),
            SIZE=ring.shape[1], CHANNELS=channels, TAPS=weight.shape[-1], BLOCK=block,
            HAS_BIAS=bias is not None, HAS_SILU=activation is not None, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
        _keep_all([inputs[0].transpose(0, 1)], [ring], at)
    return out.transpose(0, 1).unsqueeze(0)


def scan(scan: Scan, kept: KeptStates, at: StateTensors) -> Tensor:
    """See :meth:`specdec.kernels.recurrent.RecurrentKernels.scan`."""
    inputs = [_contiguous_heads(values[0]) for values in scan.inputs]
    reads = [_contiguous_heads(values[0]) for values in scan.reads]
    launch: Any = _LAUNCHES[type(scan)]
    with torch.cuda.device_of(inputs[0]):
        out: Tensor = launch(scan, inputs, reads, kept, at)
        _keep_all(inputs, kept.inputs, at)
    return out.unsqueeze(0)


def _launch_delta_rule(
    scan: DeltaRule, inputs: Sequence[Tensor], reads: Sequence[Tensor], kept: KeptStates, at: StateTensors
) -> Tensor:
    (key, value, decay, beta), (query,) = inputs, reads
    (num_tokens, heads, dim), (_, key_heads, key_dim) = value.shape, key.shape
    padded, rows = _blocks(key_dim, dim)
    out = value.new_zeros(num_tokens, heads, dim)
    _delta_rule[(_num_rows(at), heads, triton.cdiv(dim, rows))](
        out, kept.first, kept.last, query, key, value, decay, beta, *kept.inputs, *_rows_of(at),
        key_dim**-0.5, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *decay.stride()[:2],
        beta.stride(0),
        SIZE=kept.inputs[0].shape[1], KEY_HEADS=key_heads, HEADS=heads, DK=key_dim, DK_PADDED=padded, DV=dim, ROWS=rows,
        BY_CHANNEL=decay.ndim == 3, NORMALIZED=scan.is_normalized, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _launch_mamba2(
    scan: Mamba2, inputs: Sequence[Tensor], reads: Sequence[Tensor], kept: KeptStates, at: StateTensors
) -> Tensor:
    (x, time, b), (c,) = inputs, reads
    (_, heads, dim), (_, groups, states) = x.shape, b.shape
    padded, rows = _blocks(states, dim)
    out, skip = torch.zeros_like(x, memory_format=torch.contiguous_format), scan.skip
    _mamba2[(_num_rows(at), heads, triton.cdiv(dim, rows))](
        out, kept.first, kept.last, x, time, b, c, *kept.inputs, scan.rates, scan.rates if skip is None else skip,
        *_rows_of(at), *x.stride()[:2], time.stride(0), *b.stride()[:2], *c.stride()[:2],
        SIZE=kept.inputs[0].shape[1], HEADS=heads, DIM=dim, GROUPS=groups, STATES=states, STATES_PADDED=padded,
        ROWS=rows, HAS_SKIP=skip is not None, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _launch_mamba1(
    scan: Mamba1, inputs: Sequence[Tensor], reads: Sequence[Tensor], kept: KeptStates, at: StateTensors
) -> Tensor:
    (x, time, b), (c, *gates) = inputs, reads
    dim, states = x.shape[1], b.shape[1]
    padded, rows = _blocks(states, dim)
    out, skip = torch.zeros_like(x, memory_format=torch.contiguous_format), scan.skip
    gate = gates[0] if gates else x
    _mamba1[(_num_rows(at), triton.cdiv(dim, rows))](
        out, kept.first, kept.last, x, time, b, c, gate, *kept.inputs, scan.rates, scan.rates if skip is None else skip,
        *_rows_of(at), x.stride(0), time.stride(0), b.stride(0), c.stride(0), gate.stride(0),
        SIZE=kept.inputs[0].shape[1], DIM=dim, STATES=states, STATES_PADDED=padded, ROWS=rows,
        HAS_SKIP=skip is not None, HAS_GATE=bool(gates), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


_LAUNCHES = {DeltaRule: _launch_delta_rule, Mamba1: _launch_mamba1, Mamba2: _launch_mamba2}


def _blocks(width: int, height: int) -> tuple[int, int]:
    """Of a state [height, width]: the width that a program takes it to have, and how many of its rows."""
    padded = max(1, int(triton.next_power_of_2(width)))
    return padded, min(int(triton.next_power_of_2(height)), max(1, _STATE_NUMBERS // padded))


def _num_rows(at: StateTensors) -> int:
    """Rows that a step may have: rows have tokens, and those that are not there come last."""
    return min(len(at.slot), len(at.token_slot))


def _rows_of(at: StateTensors) -> Sequence[Tensor]:
    return at.slot, at.start, at.count, at.length, at.oldest, at.newest, at.oldest_after


def _contiguous_heads(values: Tensor) -> Tensor:
    """[T, ...], whose last dimension is contiguous."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _keep_all(values: Sequence[Tensor], pools: Sequence[Tensor], at: StateTensors) -> None:
    flat = [value.flatten(1) for value in values]
    flat = [value if value.stride(1) == 1 else value.contiguous() for value in flat]
    widths = [value.shape[1] for value in flat]
    num_missing = _MAX_INPUTS - len(flat)
    no_pools, no_values = [pools[0]] * num_missing, [flat[0]] * num_missing
    _keep[(len(at.token_slot),)](
        *pools, *no_pools, *flat, *no_values,
        *(value.stride(0) for value in flat), *[0] * num_missing, at.token_slot, at.token_position, at.token_left,
        SIZE=pools[0].shape[1], **{f"WIDTH_{i}": w for i, w in enumerate(widths + [0] * num_missing)},
        BLOCK=min(1024, max(triton.next_power_of_2(w) for w in widths)), num_warps=4,
    )  # fmt: skip
