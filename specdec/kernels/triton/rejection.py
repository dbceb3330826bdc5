"""The classical rule in kernels: ratio tests down a chain or a tree, then a draw from what is left.

What ``specdec.sampling.rejection.verify_rejection`` computes with probabilities, in integers: a token weighs its mass,
a row's weights sum to W, and a refused token takes ``floor(q W)`` from each token of its distribution q, down to 0.
Only the tokens of refused distributions change, so that a test reads some thirty tokens and the draw alone a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels import sample
from specdec.kernels.triton.fixed import mass

_NUM_ACCEPTED, _FLAGS, _NUM_FIXED = (
    tl.constexpr(value) for value in (sample.NUM_ACCEPTED, sample.FLAGS, sample.NUM_FIXED)
)
_CERTAIN = tl.constexpr(1 << 40)
_TARGET = tl.constexpr(2)
"""``Purpose.TARGET``."""


@triton.jit
def cell(sequence, BLOCK: tl.constexpr):
    """A program's row, the sequence that it is of, its block of the vocabulary, and the tokens there."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    return row, tl.load(sequence + row), block, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _weights(scaled, threshold, chosen, row, token, is_token, is_greedy, V: tl.constexpr, HAS_TRUNCATION: tl.constexpr):
    """What tokens weigh in a row, before any refusal; all on one with temperature 0."""
    x = tl.load(scaled + row.to(tl.int64) * V + token, mask=is_token, other=float("-inf"))
    weight = mass(x)
    if HAS_TRUNCATION:
        # Rows with temperature 0 have no threshold, and look at none.
        weight = tl.where(x >= tl.load(threshold + row), weight, 0)
    certain = tl.where(token == tl.load(chosen + row), _CERTAIN, 0)
    return tl.where(is_token, tl.where(is_greedy, certain, weight), 0)


@triton.jit
def _share(token, ids, probs, row, total, V: tl.constexpr, WIDTH: tl.constexpr):
    """floor(q W) of tokens, where q is the distribution of a row's draft token and W what was left there."""
    q = tl.zeros_like(token).to(tl.float32)
    for i in range(WIDTH):
        prob = tl.maximum(tl.load(probs + row * WIDTH + i), 0.0)
        q += tl.where(token == tl.load(ids + row * WIDTH + i), prob, 0.0)
    return (q.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit
def weigh(
    scaled, threshold, chosen, block_mass, sequence, temperature,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HAS_TRUNCATION: tl.constexpr,
):  # fmt: skip
    """A program for each row and block: what its tokens weigh together."""
    row, owner, block, token = cell(sequence, BLOCK)
    if owner < 0:
        return
    is_greedy = tl.load(temperature + owner) <= 0
    weight = _weights(scaled, threshold, chosen, row, token, token < V, is_greedy, V, HAS_TRUNCATION)
    tl.store(block_mass + row * BLOCKS + block, tl.sum(weight, 0))


@triton.jit
def _uniform(high, low):
    """53 bits of two words, as ``specdec.sampling.noise.uniforms`` takes them: strictly inside (0, 1)."""
    bits = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def descend(
    scaled, threshold, chosen, block_mass, row_flags, draft, parent, position, ids, probs, first, count, rejects, seed,
    temperature, left, last_row, goal, record, record_row,
    V: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
    MAX_ROWS: tl.constexpr, HAS_TRUNCATION: tl.constexpr,
):  # fmt: skip
    """A program for each sequence: the ratio tests, and where in which row's weights the next token is drawn.

    ``left`` [N] becomes, for each draft token that was refused and takes effect, what weighed W before; else 0.
    """
    sequence = tl.program_id(0)
    if tl.load(rejects + sequence) == 0:
        return
    start = tl.load(first + sequence)
    rows = tl.load(count + sequence)
    if rows == 0:
        return
    to = record + sequence * record_row
    place = tl.arange(0, MAX_ROWS)
    tl.store(to + _NUM_FIXED + place, -1)
    tl.store(to + _NUM_FIXED + MAX_ROWS + place, -1)
    tl.debug_barrier()
    is_greedy = tl.load(temperature + sequence) <= 0
    b = tl.arange(0, BLOCKS_PADDED)
    c = tl.arange(0, WIDTH_PADDED)
    key = tl.load(seed + sequence)
    zero = tl.zeros([1], tl.uint32)
    at = start
    total = tl.sum(tl.load(block_mass + at * BLOCKS + b, mask=b < BLOCKS, other=0), 0)
    number = 0
    accepted = 0
    flags = tl.load(row_flags + at)
    for row in range(start + 1, start + rows):
        tl.store(left + row, 0)
        if tl.load(parent + row) == at:
            token = tl.load(draft + row)
            token_id = tl.load(ids + row * WIDTH + c, mask=c < WIDTH, other=-1)
            prob = tl.load(probs + row * WIDTH + c, mask=c < WIDTH, other=0.0)
            known = (token_id >= 0) & (token_id < V) & (prob > 0)
            q = tl.sum(tl.where(known & (token_id == token), prob, 0.0), 0)
            if q > 0:
                weight = _weights(scaled, threshold, chosen, at, token_id, known, is_greedy, V, HAS_TRUNCATION)
                for earlier in range(start + 1, row):
                    if tl.load(parent + earlier) == at:
                        before = tl.load(left + earlier)
                        if before > 0:
                            weight = tl.maximum(weight - _share(token_id, ids, probs, earlier, before, V, WIDTH), 0)
                own = tl.max(tl.where(known & (token_id == token), weight, 0), 0)
                w0, w1, w2, w3 = tl.philox(
                    key, zero + number, zero + tl.load(position + at).to(tl.uint32), zero + _TARGET, zero
                )
                u = tl.sum(_uniform(w0, w1), 0)
                if u * q.to(tl.float64) * total.to(tl.float64) < own.to(tl.float64):
                    tl.store(to + _NUM_FIXED + accepted, token)
                    tl.store(to + _NUM_FIXED + MAX_ROWS + accepted, row - start - 1)
                    accepted += 1
                    at = row
                    total = tl.sum(tl.load(block_mass + at * BLOCKS + b, mask=b < BLOCKS, other=0), 0)
                    number = -1
                    flags = flags | tl.load(row_flags + at)
                else:
                    share = _share(token_id, ids, probs, row, total, V, WIDTH)
                    rest = total - tl.sum(tl.where(known, tl.minimum(weight, share), 0), 0)
                    if rest > 0:
                        tl.store(left + row, total)
                        total = rest
            number += 1
            tl.debug_barrier()
    w0, w1, w2, w3 = tl.philox(key, zero, zero + tl.load(position + at).to(tl.uint32), zero + _TARGET, zero)
    u = tl.sum(_uniform(w2, w3), 0)
    tl.store(goal + sequence, (u * total.to(tl.float64)).to(tl.int64))
    tl.store(last_row + sequence, at)
    tl.store(to + _NUM_ACCEPTED, accepted)
    tl.store(to + _FLAGS, flags)


@triton.jit
def draw(
    scaled, threshold, chosen, parent, ids, probs, first, count, rejects, temperature, left, last_row, goal,
    record, record_row,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, HAS_TRUNCATION: tl.constexpr,
):  # fmt: skip
    """A program for each sequence: the token whose weights reach past the goal, in the order of ids."""
    sequence = tl.program_id(0)
    rows = tl.load(count + sequence)
    if (tl.load(rejects + sequence) == 0) | (rows == 0):
        return
    start = tl.load(first + sequence)
    at = tl.load(last_row + sequence)
    aim = tl.load(goal + sequence)
    is_greedy = tl.load(temperature + sequence) <= 0
    passed = tl.zeros([1], tl.int64)
    to = record + sequence * record_row
    to += _NUM_FIXED + tl.load(to + _NUM_ACCEPTED)
    for block in range(BLOCKS):
        if tl.max(passed, 0) <= aim:
            token = block * BLOCK + tl.arange(0, BLOCK)
            weight = _weights(scaled, threshold, chosen, at, token, token < V, is_greedy, V, HAS_TRUNCATION)
            for row in range(start + 1, start + rows):
                if tl.load(parent + row) == at:
                    before = tl.load(left + row)
                    if before > 0:
                        weight = tl.maximum(weight - _share(token, ids, probs, row, before, V, WIDTH), 0)
            reached = tl.cumsum(weight, 0) + tl.max(passed, 0)
            found = tl.min(tl.where(reached > aim, token, 2147483647), 0)
            if found < 2147483647:
                tl.store(to, found)
            passed += tl.sum(weight, 0)
