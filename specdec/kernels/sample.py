"""From a step's logits to its decisions on the device: what the kernels are told, and how their record is laid out.

This module owns the arrays; the kernels are in :mod:`specdec.kernels.triton.sample`. What they compute is what
``specdec.sampling`` computes row by row, which stays their reference: edits in its order, truncation to the same
tokens, the same noise bit for bit, and its walks down chains and trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import fixed

NUM_ACCEPTED, FLAGS, NUM_FIXED = 0, 1, 2
"""Columns of a record: accepted draft tokens; flags; then come the run's tokens, and then the path's places."""
NOT_FINITE = 1
"""Flag of a sequence that met a row whose largest logit was not finite: its tokens mean nothing."""


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
        slot: [R], its place in ``counts`` and ``prompt_bits``.
        penalties: float32 [R, 3]: repetition, frequency, presence; 1, 0, 0 for none.
        counts: [slots, V], how often each token is in the output.
        prompt_bits: [slots, ceil(V / 32)], which tokens are in the prompt.
        bias_token: [R, B], -1 for none.
        bias: float32 [R, B].
        allowed: [R], the row of ``masks`` of the tokens that the request allows; -1 for all.
        grammar: [N], the row of ``masks`` of the tokens that the row's grammar allows; -1 for all.
        masks: [M, ceil(V / 32)], a bit for each token.
        ended: [N, E], tokens that would end the sequence before ``min_tokens``; -1 for none.
        bad: [N, W], tokens that would complete a bad word; -1 for none.
        rejects: [R], 1 where the request has the rejection rule, else 0.
        draft_ids: [N, C], under that rule, what the draft token was drawn from; -1 for none.
        draft_probs: float32 [N, C], and with which probabilities.
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
    bias_token: Tensor
    bias: Tensor
    allowed: Tensor
    grammar: Tensor
    masks: Tensor
    ended: Tensor
    bad: Tensor
    rejects: Tensor
    draft_ids: Tensor
    draft_probs: Tensor


def record_width(max_rows: int) -> int:
    """Columns of a record of sequences with at most ``max_rows`` rows each."""
    return NUM_FIXED + 2 * max_rows


def thresholds(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least logit that each row keeps, by integer mass: the same on every device.

    Args:
        scaled: float32 [N, V], each row's largest 0.
        top_k: [N]; 0 for all.
        top_p: float64 [N]; 1 for all.
        min_p: float32 [N], its logarithm.

    Returns:
        float32 [N]; -inf where a row keeps everything.
    """
    ordered = scaled.sort(1, descending=True).values
    is_cut = (top_k > 0) & (top_k < scaled.shape[1])
    by_k = ordered.gather(1, (top_k.long() - 1).clamp(0, scaled.shape[1] - 1)[:, None])
    by_k = by_k.masked_fill(~is_cut[:, None], -torch.inf)
    mass = fixed.mass(ordered).masked_fill(ordered < by_k, 0)
    goal = (top_p[:, None] * mass.sum(1, keepdim=True).double()).ceil().long().clamp(min=1)
    last = (mass.cumsum(1) < goal).sum(1, keepdim=True).clamp(max=scaled.shape[1] - 1)
    by_p = ordered.gather(1, last).masked_fill((top_p >= 1)[:, None], -torch.inf)
    return torch.maximum(torch.maximum(by_k, by_p)[:, 0], min_p)
