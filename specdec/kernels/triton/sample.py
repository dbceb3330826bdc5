"""The kernels of :mod:`specdec.kernels.sample`: edits, truncation, noise, choice, acceptance, log probabilities.

Each row of logits is cut into blocks of the vocabulary. ``_edit`` applies what changes single logits and finds each
block's largest; ``_scale`` settles what gives way to what, and divides by the temperature; ``_gather`` lists the tokens
that truncation may cut between, and ``_truncate`` finds the least logit kept; ``_choose`` adds the noise and finds each
block's best; ``_settle`` finds each row's; ``_walk`` goes down a sequence's draft and writes its record. Whatever is
summed is summed in integers, so that no order of blocks is in the numbers. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels import sample
from specdec.kernels.sample import SampleStep, record_width
from specdec.kernels.triton.fixed import gumbel, mass, words

_BLOCK = 1024
_LEVELS, _PART = 8, 8
"""Levels of logits that blocks count their tokens by; and blocks whose candidates one program gathers."""
_NO_TOKEN = tl.constexpr(2147483647)
_NUM_ACCEPTED, _FLAGS, _NUM_FIXED = (
    tl.constexpr(value) for value in (sample.NUM_ACCEPTED, sample.FLAGS, sample.NUM_FIXED)
)
_NOT_FINITE = tl.constexpr(sample.NOT_FINITE)
# What ``_edit`` finds the largest of in each block: what bad words leave; that and the grammar; the grammar alone
# beside other edits; the grammar alone.
_LEFT, _ALL, _WITHOUT_BAD, _GRAMMAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _cell(sequence, BLOCK: tl.constexpr):
    """A program's row, the sequence that it is of, its block of the vocabulary, and the tokens there."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    return row, tl.load(sequence + row), block, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _load(values, line, stride, token, V: tl.constexpr):
    at = line.to(tl.int64) * stride + token
    return tl.load(values + at, mask=token < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _banned(x, token, tokens, line, length):
    """X with -inf for each of a line's tokens."""
    for i in range(length):
        x = tl.where(token == tl.load(tokens + line * length + i), float("-inf"), x)
    return x


@triton.jit
def _masked(x, token, masks, number, WORDS: tl.constexpr, V: tl.constexpr):
    """X with -inf for the tokens that a mask does not have; -1 is no mask."""
    at = masks + tl.maximum(number, 0).to(tl.int64) * WORDS + token // 32
    word = tl.load(at, mask=(token < V) & (number >= 0), other=-1)
    return tl.where((word >> (token % 32)) & 1 == 1, x, float("-inf"))


@triton.jit(do_not_specialize=["num_rows", "num_ahead", "num_biases", "num_ended", "num_bad"])
def _edit(
    logits, edited, best, sequence, ahead, slot, penalties, counts, prompt_bits, bias_token, bias, allowed,
    grammar, masks, ended, bad, logits_row, num_rows, num_ahead, num_biases, num_ended, num_bad,
    V: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr, HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """A program for each row and block."""
    row, owner, block, token = _cell(sequence, BLOCK)
    if owner < 0:
        return
    given = _load(logits, row, logits_row, token, V)
    # Devices differ in what the largest of a NaN and a number is.
    given = tl.where(given == given, given, float("inf"))
    x = given
    for i in range(num_biases):
        is_it = token == tl.load(bias_token + owner * num_biases + i)
        x = tl.where(is_it, x + tl.load(bias + owner * num_biases + i), x)
    if HAS_PENALTIES:
        repetition = tl.load(penalties + owner * 3)
        frequency = tl.load(penalties + owner * 3 + 1)
        presence = tl.load(penalties + owner * 3 + 2)
        place = tl.load(slot + owner).to(tl.int64)
        count = tl.load(counts + place * V + token, mask=token < V, other=0)
        for i in range(num_ahead):
            count += tl.where(token == tl.load(ahead + row * num_ahead + i), 1, 0)
        bits = tl.load(prompt_bits + place * WORDS + token // 32, mask=token < V, other=0)
        factor = tl.where((count > 0) | ((bits >> (token % 32)) & 1 == 1), repetition, 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - (frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0))
    if HAS_MASKS:
        x = _masked(x, token, masks, tl.load(allowed + owner), WORDS, V)
    x = _banned(x, token, ended, row, num_ended)
    left = _banned(x, token, bad, row, num_bad)
    at = row.to(tl.int64) * V + token
    tl.store(edited + at, x, mask=token < V)
    number = -1
    if HAS_MASKS:
        number = tl.load(grammar + row)
    to = row * BLOCKS + block
    size = num_rows * BLOCKS
    tl.store(best + _LEFT * size + to, tl.max(left, 0))
    if HAS_MASKS:
        tl.store(best + _ALL * size + to, tl.max(_masked(left, token, masks, number, WORDS, V), 0))
        tl.store(best + _WITHOUT_BAD * size + to, tl.max(_masked(x, token, masks, number, WORDS, V), 0))
        tl.store(best + _GRAMMAR * size + to, tl.max(_masked(given, token, masks, number, WORDS, V), 0))
    else:
        tl.store(best + _ALL * size + to, tl.max(left, 0))
        tl.store(best + _WITHOUT_BAD * size + to, tl.max(x, 0))
        tl.store(best + _GRAMMAR * size + to, tl.max(given, 0))


@triton.jit(do_not_specialize=["num_rows", "num_bad"])
def _scale(
    logits, edited, best, block_top, level_count, level_mass, row_flags, sequence, temperature, grammar, masks, bad,
    logits_row, num_rows, num_bad, V: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr, HAS_MASKS: tl.constexpr, HAS_TRUNCATION: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """A program for each row and block: ``edited`` becomes (logit - row's largest) / temperature.

    For truncation it counts and weighs what reaches each of a few levels, so that few tokens are looked at again.
    """
    row, owner, block, token = _cell(sequence, BLOCK)
    if owner < 0:
        return
    b = tl.arange(0, BLOCKS_PADDED)
    size = num_rows * BLOCKS
    at = best + row * BLOCKS + b
    left = tl.max(tl.load(at + _LEFT * size, mask=b < BLOCKS, other=float("-inf")), 0)
    top = tl.max(tl.load(at + _ALL * size, mask=b < BLOCKS, other=float("-inf")), 0)
    # Bad words give way where nothing would be left, everything else gives way to the grammar.
    keeps_bad = left == float("-inf")
    if keeps_bad:
        top = tl.max(tl.load(at + _WITHOUT_BAD * size, mask=b < BLOCKS, other=float("-inf")), 0)
    number = -1
    if HAS_MASKS:
        number = tl.load(grammar + row)
    x = _load(edited, row, V, token, V)
    if keeps_bad == 0:
        x = _banned(x, token, bad, row, num_bad)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    if (is_finite == 0) & (number >= 0):
        top = tl.max(tl.load(at + _GRAMMAR * size, mask=b < BLOCKS, other=float("-inf")), 0)
        x = _load(logits, row, logits_row, token, V)
        is_finite = (top > float("-inf")) & (top < float("inf"))
    if HAS_MASKS:
        x = _masked(x, token, masks, number, WORDS, V)
    heat = tl.load(temperature + owner)
    x = x - top
    x = tl.div_rn(x, tl.where(heat > 0, heat, 1.0) + tl.zeros_like(x))
    # A NaN would spread; the row is flagged.
    x = tl.where(x <= 0.0, x, float("-inf"))
    tl.store(edited + row.to(tl.int64) * V + token, x, mask=token < V)
    highest = tl.max(x, 0)
    tl.store(block_top + row * BLOCKS + block, highest)
    if HAS_TRUNCATION:
        weight = mass(x)
        for number in tl.static_range(LEVELS):
            least = _level(number, LEVELS)
            count = 0
            weighed = tl.zeros([1], tl.int64)
            if highest >= least:
                is_in = (token < V) & (x >= least)
                count = tl.sum(is_in.to(tl.int32), 0)
                weighed += tl.sum(tl.where(is_in, weight, 0), 0)
            to = (row * BLOCKS + block) * LEVELS + number
            tl.store(level_count + to, count)
            tl.store(level_mass + to + tl.arange(0, 1), weighed)
    if block == 0:
        tl.store(row_flags + row, tl.where(is_finite, 0, _NOT_FINITE))


@triton.jit
def _order(x):
    """Integers in the order of float32 numbers that are at most 0, from 0 for the least: -0 is 0."""
    return -((x + 0.0).to(tl.int32, bitcast=True) & 2147483647) + 2139095040


@triton.jit
def _level(number, LEVELS: tl.constexpr):
    """The least number that a level has: -2, -4 .., and -inf, the last one's."""
    return tl.where(number < LEVELS - 1, -2.0 * (number + 1), float("-inf"))


@triton.jit
def _goal(top_p, whole):
    """The mass that top_p keeps of an integer."""
    return tl.maximum(tl.ceil(top_p * whole.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _cut(sequence, temperature, top_k, top_p, row, V: tl.constexpr):
    """How many tokens top_k leaves of a row, V for all, and top_p: V and 1 where there is nothing to find."""
    owner = tl.load(sequence + row)
    at = tl.maximum(owner, 0)
    k = tl.load(top_k + at)
    is_cut = (owner >= 0) & (tl.load(temperature + at) > 0)
    return tl.where(is_cut & (k > 0) & (k < V), k, V), tl.where(is_cut, tl.load(top_p + at), 1.0)


@triton.jit
def _candidates(level_count, level_mass, row, k, p, V: tl.constexpr, BLOCKS: tl.constexpr,
                BLOCKS_PADDED: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """The first level that holds all that truncation keeps; its tokens; and the row's mass."""
    b = tl.arange(0, BLOCKS_PADDED)
    number = tl.arange(0, LEVELS)
    at = (row * BLOCKS + b)[:, None] * LEVELS + number[None, :]
    is_inside = (b < BLOCKS)[:, None] & (number >= 0)[None, :]
    count = tl.sum(tl.load(level_count + at, mask=is_inside, other=0), 0)
    weight = tl.sum(tl.load(level_mass + at, mask=is_inside, other=0), 0)
    whole = tl.max(weight, 0)
    holds = tl.where(k < V, count >= k, weight >= _goal(p, whole))
    level = tl.min(tl.where(holds, number, LEVELS - 1), 0)
    return level, tl.sum(tl.where(number == level, count, 0), 0), whole


@triton.jit
def _gather(
    scaled, level_count, level_mass, candidates, sequence, temperature, top_k, top_p,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr,
    LEVELS: tl.constexpr, ROOM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A program for each row and PART blocks: candidates one behind another, in order, where there is room for all."""
    row = tl.program_id(0)
    k, p = _cut(sequence, temperature, top_k, top_p, row, V)
    if (k == V) & (p >= 1):
        return
    level, num_candidates, _ = _candidates(level_count, level_mass, row, k, p, V, BLOCKS, BLOCKS_PADDED, LEVELS)
    if num_candidates > ROOM:
        return
    b = tl.arange(0, BLOCKS_PADDED)
    count = tl.load(level_count + (row * BLOCKS + b) * LEVELS + level, mask=b < BLOCKS, other=0)
    first = tl.program_id(1) * PART
    start = row * ROOM + tl.sum(tl.where(b < first, count, 0), 0)
    for block in range(first, tl.minimum(first + PART, BLOCKS)):
        num_here = tl.sum(tl.where(b == block, count, 0), 0)
        if num_here > 0:
            token = block * BLOCK + tl.arange(0, BLOCK)
            x = _load(scaled, row, V, token, V)
            is_in = (token < V) & (x >= _level(level, LEVELS))
            tl.store(candidates + start + tl.cumsum(is_in.to(tl.int32), 0) - 1, x, mask=is_in)
            start += num_here


@triton.jit
def _select(values, size, goal, least, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that the numbers with at least that key, and ``least``, have ``goal`` tokens or mass."""
    found = 0
    pivot = tl.arange(0, 16)
    for step in range(8):
        width = 1 << (28 - 4 * step)
        # The first pivot is known to reach the goal.
        at = found + pivot * width
        above = tl.zeros([16], tl.int64)
        for block in range(tl.cdiv(size, BLOCK)):
            i = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(values + i, mask=i < size, other=float("-inf"))
            key = tl.where(i < size, _order(x), -1)
            weight = tl.where(key >= least, 1, 0).to(tl.int64)
            if BY_MASS:
                weight = weight * mass(x)
            above += tl.sum(tl.where(key[None, :] >= at[:, None], weight[None, :], 0), 1)
        is_enough = (above >= goal) & (at >= found)  # those past 31 bits are negative
        found += tl.maximum(tl.max(tl.where(is_enough, pivot, 0), 0), 0) * width
    return found


@triton.jit
def _truncate(
    scaled, level_count, level_mass, candidates, threshold, sequence, temperature, top_k, top_p, min_p,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr,
    LEVELS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A program for each row, over its candidates, or all tokens where these are too many."""
    row = tl.program_id(0)
    k, p = _cut(sequence, temperature, top_k, top_p, row, V)
    least = 0
    if (k < V) | (p < 1):
        _, size, whole = _candidates(level_count, level_mass, row, k, p, V, BLOCKS, BLOCKS_PADDED, LEVELS)
        values = candidates + row.to(tl.int64) * ROOM
        if size > ROOM:
            values = scaled + row.to(tl.int64) * V
        size = tl.where(size > ROOM, V, size)
        if k < V:
            least = _select(values, size, k.to(tl.int64), 0, False, BLOCK)
            total = tl.zeros([BLOCK], tl.int64)
            for block in range(tl.cdiv(size, BLOCK)):
                i = block * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(values + i, mask=i < size, other=float("-inf"))
                total += tl.where((i < size) & (_order(x) >= least), mass(x), 0)
            whole = tl.sum(total, 0)
        if p < 1:
            least = tl.maximum(least, _select(values, size, _goal(p, whole), least, True, BLOCK))
    value = (2139095040 - least) | -2147483648
    value = value.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(threshold + row, tl.maximum(value, tl.load(min_p + tl.maximum(tl.load(sequence + row), 0))))


@triton.jit
def _choose(
    scaled, threshold, block_top, block_best, block_token, scores, sequence, position, seed, temperature,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HAS_TRUNCATION: tl.constexpr,
    HAS_NOISE: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """A program for each row and block: the best token there, the lowest of those that tie."""
    row, owner, block, token = _cell(sequence, BLOCK)
    if owner < 0:
        return
    x = _load(scaled, row, V, token, V)
    if HAS_NOISE:
        if tl.load(temperature + owner) > 0:
            least = float("-inf")
            if HAS_TRUNCATION:
                least = tl.load(threshold + row)
            # Where nothing is kept noise changes nothing.
            if tl.load(block_top + row * BLOCKS + block) >= least:
                word = words(tl.load(seed + owner), tl.load(position + row), block * BLOCK, BLOCK // 4)
                x = tl.where(x >= least, gumbel(word) + x, float("-inf"))
            else:
                x = tl.full([BLOCK], float("-inf"), tl.float32)
    if KEEPS:
        tl.store(scores + row.to(tl.int64) * V + token, x, mask=token < V)
    highest = tl.max(x, 0)
    tl.store(block_best + row * BLOCKS + block, highest)
    tl.store(block_token + row * BLOCKS + block, tl.min(tl.where(x == highest, token, _NO_TOKEN), 0))


@triton.jit
def _settle(
    block_best, block_token, chosen, sequence,
    BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr,
):  # fmt: skip
    """A program for each row."""
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS_PADDED)
    inside = (b < BLOCKS) & (tl.load(sequence + row) >= 0)
    value = tl.load(block_best + row * BLOCKS + b, mask=inside, other=float("-inf"))
    token = tl.load(block_token + row * BLOCKS + b, mask=inside, other=_NO_TOKEN)
    best = tl.min(tl.where(value == tl.max(value, 0), token, _NO_TOKEN), 0)
    tl.store(chosen + row, tl.where(best == _NO_TOKEN, -1, best))


@triton.jit
def _walk(
    chosen, row_flags, draft, parent, first, count, record, record_row,
    MAX_ROWS: tl.constexpr,
):  # fmt: skip
    """A program for each sequence: a draft token is kept if what it follows was, and it was chosen there."""
    sequence = tl.program_id(0)
    start = tl.load(first + sequence)
    rows = tl.load(count + sequence)
    to = record + sequence * record_row
    place = tl.arange(0, MAX_ROWS)
    tl.store(to + _NUM_FIXED + place, -1)
    tl.store(to + _NUM_FIXED + MAX_ROWS + place, -1)
    tl.debug_barrier()
    at = start
    accepted = 0
    flags = 0
    if rows > 0:
        flags = tl.load(row_flags + start)
        for row in range(start + 1, start + rows):
            token = tl.load(draft + row)
            if (tl.load(parent + row) == at) & (token == tl.load(chosen + at)):
                tl.store(to + _NUM_FIXED + accepted, token)
                tl.store(to + _NUM_FIXED + MAX_ROWS + accepted, row - start - 1)
                accepted += 1
                at = row
                flags = flags | tl.load(row_flags + at)
        tl.store(to + _NUM_FIXED + accepted, tl.load(chosen + at))
    tl.store(to + _NUM_ACCEPTED, accepted)
    tl.store(to + _FLAGS, flags)


class TritonSampler:
    """Decides steps; captured in a graph, it serves every later step of the same sizes.

    Args:
        vocab_size: V; logits may have more columns, which are never chosen.
        max_rows: N, most rows of a step.
        max_sequences: R, most sequences of a step.
        max_tokens: Most rows of a sequence; a power of two.
        device: A GPU; or the CPU under Triton's interpreter.
        block_size: Tokens of a block; a power of two.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        max_sequences: int,
        max_tokens: int,
        device: torch.device,
        block_size: int = _BLOCK,
    ) -> None:
        self._vocab_size, self._max_tokens, self._block = vocab_size, max_tokens, block_size
        self._num_blocks = -(-vocab_size // block_size)
        self.edited = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=device)
        """float32 [max_rows, V], to work in; it may take the scores."""
        shape = max_rows, self._num_blocks
        self._best = torch.empty(4, *shape, dtype=torch.float32, device=device)
        self._block_top, self._block_best = torch.empty(2, *shape, dtype=torch.float32, device=device).unbind()
        self._block_token = torch.empty(shape, dtype=torch.int32, device=device)
        self._level_count = torch.empty(*shape, _LEVELS, dtype=torch.int32, device=device)
        self._level_mass = torch.empty(*shape, _LEVELS, dtype=torch.int64, device=device)
        self._room = -(-vocab_size // (16 * block_size)) * block_size
        self._candidates = torch.empty(max_rows, self._room, dtype=torch.float32, device=device)
        self._threshold = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._flags = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.chosen = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """int32 [max_rows]: every row's token, or -1."""
        self.record = torch.zeros(max_sequences, record_width(max_tokens), dtype=torch.int32, device=device)
        """int32 [R, :func:`~specdec.kernels.sample.record_width`]."""

    @property
    def num_bytes(self) -> int:
        """Memory of its buffers."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def decide(
        self,
        logits: Tensor,
        step: SampleStep,
        *,
        penalties: bool,
        truncation: bool,
        noise: bool,
        scores: Tensor | None = None,
        record: Tensor | None = None,
    ) -> None:
        """Choose each row's token, walk each sequence's draft, and write the records.

        Args:
            logits: [N, at least V], as the model gave them; not changed.
            step: The rows.
            penalties: Whether any request has some. What a request does not use costs little, and what none uses is
                left out of the kernels: a graph for each of few combinations.
            truncation: Whether any has top_k, top_p or min_p.
            noise: Whether any has a temperature.
            scores: float32 [N, V], takes what is chosen by, with noise.
            record: Takes the records, in the place of :attr:`record`: as wide, int32, at least a line a sequence.
        """
        record = self.record if record is None else record
        num_rows, num_sequences, v = len(step.sequence), len(step.first), self._vocab_size
        sizes = {"V": v, "BLOCK": self._block, "BLOCKS": self._num_blocks}
        padded = {"BLOCKS_PADDED": triton.next_power_of_2(self._num_blocks)}
        masks = {"WORDS": -(-v // 32), "HAS_MASKS": len(step.masks) > 0}
        levels = {"LEVELS": _LEVELS}
        options = {"num_warps": 4, "enable_fp_fusion": False}
        cells = num_rows, self._num_blocks
        _edit[cells](
            logits, self.edited, self._best, step.sequence, step.ahead, step.slot, step.penalties,
            step.counts, step.prompt_bits, step.bias_token, step.bias, step.allowed, step.grammar, step.masks,
            step.ended, step.bad, logits.stride(0), self._best.shape[1], step.ahead.shape[1],
            step.bias.shape[1], step.ended.shape[1], step.bad.shape[1],
            HAS_PENALTIES=penalties, **sizes, **masks, **options,
        )  # fmt: skip
        _scale[cells](
            logits, self.edited, self._best, self._block_top, self._level_count, self._level_mass, self._flags,
            step.sequence, step.temperature, step.grammar, step.masks, step.bad, logits.stride(0),
            self._best.shape[1], step.bad.shape[1],
            HAS_TRUNCATION=truncation, **sizes, **padded, **masks, **levels, **options,
        )  # fmt: skip
        if truncation:
            given = self.edited, self._level_count, self._level_mass, self._candidates
            wanted = step.sequence, step.temperature, step.top_k, step.top_p
            shapes = sizes | padded | levels | {"ROOM": self._room}
            _gather[(num_rows, -(-self._num_blocks // _PART))](*given, *wanted, PART=_PART, **shapes, **options)
            _truncate[(num_rows,)](*given, self._threshold, *wanted, step.min_p, **shapes, **options | {"num_warps": 8})
        kept = self.edited if scores is None else scores
        _choose[cells](
            self.edited, self._threshold, self._block_top, self._block_best, self._block_token, kept, step.sequence,
            step.position, step.seed, step.temperature,
            HAS_TRUNCATION=truncation, HAS_NOISE=noise, KEEPS=scores is not None, **sizes, **options,
        )  # fmt: skip
        _settle[(num_rows,)](
            self._block_best,
            self._block_token,
            self.chosen,
            step.sequence,
            BLOCKS=self._num_blocks,
            **padded,
            **options,
        )
        _walk[(num_sequences,)](
            self.chosen, self._flags, step.draft, step.parent, step.first, step.count, record, record.stride(0),
            MAX_ROWS=self._max_tokens, **options,
        )  # fmt: skip
