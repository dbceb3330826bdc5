"""The classical rule of speculative sampling, with the draft's distribution cut to its most likely tokens.

Leviathan, Kalman and Matias 2023 (algorithm 1), Chen et al. 2023 (algorithm 2). The draft is drawn from the truncated
distribution, so that what travels, 32 ids and probabilities, is exactly what it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.sampling.philox import Role, uniforms
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup, Rows, VerifiedRun

NUM_DRAFT_CANDIDATES = 32


class TruncatedDraft(NamedTuple):
    """Draft tokens with what they were drawn from; one row per group, C = min(32, vocabulary size).

    Attributes:
        tokens: int64 [N].
        ids: int64 [N, C], distinct in a row.
        probs: float32 [N, C], summing to 1.
    """

    tokens: Tensor
    ids: Tensor
    probs: Tensor


def propose_truncated(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup]) -> TruncatedDraft:
    """Draw one draft token per group from the 32 most likely ones.

    Args:
        sampler: Applies each request's parameters to the draft's logits.
        logits: float32 [N, at least V], the draft model's.
        groups: N sequences without drafts: one row each. ``tokens`` include the chain drafted so far.
    """
    rows = Rows(groups)
    probs, ids = sampler.probs(logits, groups).topk(min(NUM_DRAFT_CANDIDATES, sampler.vocab_size), dim=1)
    probs /= probs.sum(1, keepdim=True)
    uniform = uniforms(rows.seeds(), rows.positions(), Role.DRAFT, logits.device)[:, 0]
    return TruncatedDraft(ids.gather(1, _draw(probs, uniform)).squeeze(1), ids, probs)


def verify_rejection(
    target_probs: Tensor, groups: Sequence[RowGroup], draft_ids: Tensor, draft_probs: Tensor
) -> list[VerifiedRun]:
    """Keep draft tokens with probability min(1, target / draft), then draw the next token.

    A token is kept iff u < target / draft, strictly, so that one the target never says does not pass. At the first one
    refused, the next token is drawn from the positive part of target - draft, normalised, or from the target where that
    has no mass. After full acceptance the bonus token is drawn at once from the target; this is settled before anything
    is drawn at its position, and no ratio test follows there. With temperature 0 all this comes to argmax equality.
    A draft token that has no probability in its own distribution cannot have been drawn from it: it is dropped with
    what follows, and its position decoded plainly.

    Random numbers: u is the first, the draw's the second uniform of (seed, position, TARGET).

    Args:
        target_probs: float32 [N, V], from ``Sampler.probs``.
        groups: The sequences of the N rows, in order.
        draft_ids: int64 [D, C]: what each draft token was drawn from, for all tokens of all drafts, in order.
        draft_probs: float32 [D, C]: and with which probabilities, summing to 1.

    Returns:
        One entry per group. One transfer from the device for all of them.
    """
    rows, device = Rows(groups), target_probs.device
    uniform = uniforms(rows.seeds(), rows.positions(), Role.TARGET, device)
    # Draft token d is chosen, or refused, in the d-th row that is not the last of its group.
    ranges = (range(start, start + count - 1) for start, count in zip(rows.starts, rows.counts, strict=True))
    at_row = torch.tensor(list(chain.from_iterable(ranges)), dtype=torch.int64, device=device)
    tokens = torch.tensor(list(chain.from_iterable(group.draft for group in groups)), dtype=torch.int64, device=device)
    ids, probs = _sane(draft_ids.to(device), draft_probs.to(target_probs), target_probs.shape[1])
    draft_prob = probs.masked_fill(ids != tokens.unsqueeze(1), 0).sum(1)
    drawn = draft_prob > 0
    target_prob = target_probs[at_row, torch.where(drawn, tokens, 0)]
    kept = torch.zeros(rows.num_rows, dtype=torch.bool, device=device)
    kept[at_row] = drawn & (uniform[at_row, 0] * draft_prob < target_prob)
    accepted = rows.leading(kept)
    stop = torch.tensor(rows.starts, device=device) + accepted
    # What is taken off the target's row where a run stops: the refused token's draft distribution, or nothing.
    refused_ids = torch.zeros(rows.num_rows, ids.shape[1], dtype=torch.int64, device=device)
    refused_probs = torch.zeros(refused_ids.shape, dtype=target_probs.dtype, device=device)
    refused_ids[at_row], refused_probs[at_row] = ids, probs * drawn.unsqueeze(1)
    following = _residual(target_probs[stop], refused_ids[stop], refused_probs[stop])
    next_tokens = _draw(following, uniform[stop, 1]).squeeze(1)
    decided: list[tuple[int, int]] = torch.stack((accepted, next_tokens), 1).tolist()
    return [
        VerifiedRun((*group.draft[:num], next_token), num)
        for group, (num, next_token) in zip(groups, decided, strict=True)
    ]


def _sane(ids: Tensor, probs: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids that exist and probabilities that are positive, 0 where they were not: a wrong drafter crashes nothing."""
    known = (ids >= 0) & (ids < vocab_size) & (probs > 0)
    return ids.where(known, 0), probs.where(known, 0)


def _residual(target_probs: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """The positive part of target - draft, not normalised; the target where nothing is left.

    Args:
        target_probs: float32 [G, V].
        ids: int64 [G, C], and
        probs: float32 [G, C]: the draft's distribution.
    """
    residual = target_probs.scatter_add(1, ids, -probs).clamp_min_(0)
    return torch.where(residual.sum(1, keepdim=True) > 0, residual, target_probs)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: int64 [G, 1] from weights [G, V] and uniforms float64 [G]."""
    cumulative = weights.cumsum(1, dtype=torch.float64)
    goal = uniform.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, goal, right=True).clamp_(max=weights.shape[1] - 1)
