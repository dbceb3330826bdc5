"""From a step's logits to its decisions on the device: what the kernels are given, and how their record is laid out.

This module owns the arrays; the kernels are in :mod:`specdec.kernels.triton.sample`. What they compute is what
``specdec.sampling`` computes row by row, which stays their reference: edits in its order, truncation to the same
tokens, the same noise bit for bit, and its walks down chains and trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specdec.kernels import fixed
from specdec.kernels.fixed import Array

NUM_ACCEPTED, FLAGS, NUM_FIXED = 0, 1, 2
"""Columns of a record: accepted draft tokens; flags; then come the run's tokens, and then the path's places."""
NOT_FINITE = 1
"""Flag of a sequence that met a row whose largest logit was not finite: its tokens mean nothing."""
_NUM_CANDIDATES = 1024
# Logits whose thresholds are found at once: that takes some ten times their memory.
_CPU_NUMBERS_PER_PASS, _GPU_NUMBERS_PER_PASS = 1 << 16, 1 << 24


@dataclass(frozen=True, slots=True)
class SampleStep:
    """A step's rows and their sequences, on the device; int32 unless said otherwise.

    The rows of a sequence follow one another: one before its draft, and one after each draft token, parents first. What
    few requests use is empty, [.., 0], where none does.

    Attributes:
        sequence: [N], each row's sequence; -1 for padding.
        position: [N], the absolute position of the token that the row chooses.
        draft: [N], the draft token that the row follows; -1 for a sequence's first row.
        parent: [N], the row of the token which that one follows; -1 for a sequence's first row.
        first: [R], a sequence's first row.
        count: [R], its rows; 0 for a sequence that is not there.
        seed: int64 [R], the bits of its seed.
        temperature: float32 [R]; 0 takes the largest logit.
        top_k: [R]; 0 for all.
        top_p: float64 [R]; 1 for all.
        min_p: float32 [R], its logarithm; -inf for all.
        slot: [R], its place in ``counts`` and ``prompt_bits``; 0 where it has no penalties.
        penalties: float32 [R, 3]: repetition, frequency, presence; 1, 0, 0 for none.
        counts: [slots, V], how often each token is in the output, but for those in ``ahead``.
        prompt_bits: [slots, ceil(V / 32)], which tokens are in the prompt.
        ahead: [N, A], tokens of the output before the row that are not in ``counts``; -1 for none.
        bias_token: [R, B], -1 for none.
        bias: float32 [R, B].
        allowed: [R], the row of ``masks`` of the tokens that the request allows; -1 for all.
        grammar: [N], the row of ``masks`` of the tokens that the row's grammar allows; -1 for all.
        masks: [M, ceil(V / 32)], a bit for each token.
        ended: [N, E], tokens that would end the sequence before ``min_tokens``; -1 for none.
        bad: [N, W], tokens that would complete a bad word; -1 for none.
    """

    sequence: Tensor
    position: Tensor
    draft: Tensor
    parent: Tensor
    first: Tensor
    count: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    slot: Tensor
    penalties: Tensor
    counts: Tensor
    prompt_bits: Tensor
    ahead: Tensor
    bias_token: Tensor
    bias: Tensor
    allowed: Tensor
    grammar: Tensor
    masks: Tensor
    ended: Tensor
    bad: Tensor


def record_width(max_rows: int) -> int:
    """Columns of a record of sequences with at most ``max_rows`` rows each."""
    return NUM_FIXED + 2 * max_rows


def thresholds(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """The least logit that each row keeps, by integer mass: the same on every device.

    As in transformers, in this order, each on what the one before has left, normalised anew (vLLM applies min_p first,
    so that top_k and top_p act on what that has left):

    - top_k keeps the k most likely tokens;
    - top_p (Holtzman et al. 2020, section 3.1) keeps the fewest most likely tokens whose probabilities reach it;
    - min_p (Nguyen et al. 2024, section 3) keeps tokens with at least that share of the most likely one's probability.

    Tokens that tie with the last one kept are kept too, so that the result depends on no order of sorting.

    Args:
        scaled: float32 [N, V], logits divided by the temperature, each row's largest 0. In numpy on a CPU, as all are.
        top_k: [N]; 0 for all.
        top_p: float64 [N]; 1 for all.
        min_p: float32 [N], its logarithm.

    Returns:
        float32 [N]; -inf where a row keeps everything.
    """
    xp = fixed.module_of(scaled)
    num_rows = max(1, (_CPU_NUMBERS_PER_PASS if xp is np else _GPU_NUMBERS_PER_PASS) // scaled.shape[1])
    passes = (slice(at, at + num_rows) for at in range(0, len(scaled), num_rows))
    found: Array = xp.concatenate([_thresholds(scaled[at], top_k[at], top_p[at], min_p[at]) for at in passes])
    return found


def _thresholds(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    xp, vocab_size = fixed.module_of(scaled), scaled.shape[1]
    is_cut, cuts_p = (top_k > 0) & (top_k < vocab_size), bool((top_p < 1).any())
    last_k = xp.where(is_cut, top_k, 0)
    # Sorting is what truncation costs, and a top_p seldom needs more than the first candidates.
    num_sorted = min(vocab_size, max(int(last_k.max()), _NUM_CANDIDATES if cuts_p else 0))
    if not num_sorted:
        return min_p
    ordered, row = _largest(scaled, num_sorted), xp.arange(len(scaled))
    by_k = xp.where(is_cut, ordered[row, xp.asarray(last_k, dtype=xp.int64) - 1], -xp.inf)
    least: Array = xp.maximum(by_k, min_p)
    if not cuts_p:
        return least
    goal = xp.clip(xp.ceil(top_p * _mass(scaled, by_k).sum(1)), 1, None)
    by_p, found = _nucleus(ordered, by_k, goal)
    # Past the last candidate, what is missing of a row cut by top_k ties with that row's last one.
    if not bool((found | (top_p >= 1) | (ordered[:, -1] <= by_k)).all()):
        by_p, _ = _nucleus(_largest(scaled, vocab_size), by_k, goal)
    nucleus: Array = xp.maximum(least, xp.where(top_p >= 1, -xp.inf, by_p))
    return nucleus


def _nucleus(ordered: Array, by_k: Array, goal: Array) -> tuple[Array, Array]:
    """The logit at which the mass of float32 [N, M] reaches a goal, or the last one; and whether it does."""
    xp, size = fixed.module_of(ordered), ordered.shape[1]
    num_short = (_mass(ordered, by_k).cumsum(1) < goal[:, None]).sum(1)
    return ordered[xp.arange(len(ordered)), xp.clip(num_short, None, size - 1)], num_short < size


def _mass(scaled: Array, least: Array) -> Array:
    """What each of float32 [N, V] weighs, 0 for what is below [N]."""
    weights = fixed.mass(scaled)
    weights *= scaled >= least[:, None]
    return weights


def _largest(values: Array, num: int) -> Array:
    """The ``num`` largest of each row of float32 [N, V], in descending order: [N, num]."""
    if isinstance(values, Tensor):
        return values.topk(num, dim=1).values
    num_rest = values.shape[1] - num
    if num_rest > 0:
        values = np.partition(values, num_rest, axis=1)[:, num_rest:]
    return np.sort(values, axis=1)[:, ::-1]
