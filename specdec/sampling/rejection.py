"""The classical rule of speculative sampling, with the draft's distribution cut to its most likely tokens.

Leviathan, Kalman and Matias 2023 (algorithm 1), Chen et al. 2023 (algorithm 2). The draft is drawn from the truncated
distribution, so that what travels, 32 ids and probabilities, is exactly what it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.sampling.philox import Purpose, uniforms
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup, Rows, VerifiedRun
from specdec.sampling.trees import children_of, depths
from specdec.types import Tokens

NUM_DRAFT_CANDIDATES = 32
_PATH_TOKENS = 256
"""Longer than anything that is drafted at once: two paths of a sequence that differ do so in so many last tokens."""


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
    return propose_several(sampler, logits, groups, 1)[0]


def propose_several(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], count: int) -> list[TruncatedDraft]:
    """Draw ``count`` draft tokens for one place of each group, without replacement.

    The first is that of :func:`propose_truncated`; each further one is drawn from what those before it have left, by a
    number of its own, and has probabilities of 0 where that is nothing.
    """
    probs, ids = sampler.probs(logits, groups).topk(min(NUM_DRAFT_CANDIDATES, sampler.vocab_size), dim=1)
    seeds = [_path_seed(group) for group in groups]
    uniform = uniforms(seeds, Rows(groups).positions(), Purpose.DRAFT, logits.device, count)
    drafts = []
    for number in range(count):
        probs = probs / probs.sum(1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)
        places = _draw(probs, uniform[:, number])
        drafts.append(TruncatedDraft(ids.gather(1, places).squeeze(1), ids, probs))
        probs = probs.scatter(1, places, 0.0)
    return drafts


def _path_seed(group: RowGroup) -> int:
    """The seed of what is drawn after these very tokens.

    A drafter draws several paths over the same positions: a chain, and branches beside it. Which branches there are
    depends on what was drawn for the chain. With numbers by seed and position alone a branch's tokens would depend on
    them as well, and whether a branch is verified must not depend on its tokens.
    """
    path = np.asarray(group.tokens[-_PATH_TOKENS:], dtype=np.int64)
    return group.spec.seed ^ int.from_bytes(blake2b(path.tobytes(), digest_size=8).digest(), "little")


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
    uniform = uniforms(rows.seeds(), rows.positions(), Purpose.TARGET, device)
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


def verify_rejection_trees(
    target_probs: Tensor,
    groups: Sequence[RowGroup],
    trees: Sequence[Tokens],
    draft_ids: Tensor,
    draft_probs: Tensor,
) -> list[VerifiedRun]:
    """Go down trees by ratio tests: each child of a token in turn, against what the refused ones have left.

    A child x that was drawn from q passes with probability min(1, p(x) / q(x)), where p is the target's distribution
    at first, and after each refused child the positive part of p - q, normalised. Where none passes, or there is none,
    the next token is drawn from p. Miao et al. 2024, "SpecInfer", algorithm 2 (multi-step speculative sampling); Jeon
    et al. 2024, "Recursive speculative decoding", for children that are drawn without replacement. Where each token has
    one child this is :func:`verify_rejection`, by the same random numbers.

    Args:
        target_probs: float32 [N, V]: of each group 1 + T rows, before its tree and after each of its T tokens.
        groups: The sequences, with the trees' tokens as drafts.
        trees: For each token of a tree which one it follows, -1 for none.
        draft_ids: int64 [sum of T, C], and
        draft_probs: float32 [sum of T, C]: what each token was drawn from, given those before it that follow the same.

    Returns:
        One entry per group. One transfer from the device for all of them.
    """
    rows, device, num_groups = Rows(groups), target_probs.device, len(groups)
    ids, probs = _sane(draft_ids.to(device), draft_probs.to(target_probs), target_probs.shape[1])
    child_rows = torch.tensor(_child_rows(rows, trees), device=device)
    most = child_rows.shape[1]
    tokens = torch.tensor([token for group in groups for token in (0, *group.draft)], device=device)
    at, group_numbers = torch.tensor(rows.starts, device=device), torch.arange(num_groups, device=device)
    is_done = torch.zeros(num_groups, dtype=torch.bool, device=device)
    following = torch.zeros(num_groups, dtype=torch.int64, device=device)
    reached = []
    for depth in range(1 + max(max(depths(tree)) for tree in trees)):
        positions = [len(group.tokens) + depth for group in groups]
        uniform = uniforms([group.spec.seed for group in groups], positions, Purpose.TARGET, device, most)
        p, there, has_moved = target_probs[at], at, is_done
        for number in range(most):
            child = child_rows[there, number]
            # Before a row of group g there are as many first rows, which hold no draft, and that of g.
            draft, token = (child - group_numbers - 1).clamp_min(0), tokens[child.clamp_min(0)].unsqueeze(1)
            drawn = probs[draft].masked_fill(ids[draft] != token, 0).sum(1)
            is_tested = ~has_moved & (child >= 0) & (drawn > 0)
            passes = uniform[:, number] * drawn * p.sum(1) < p.gather(1, token).squeeze(1)
            at = torch.where(is_tested & passes, child, at)
            has_moved = has_moved | (is_tested & passes)
            left = _residual(p / p.sum(1, keepdim=True), ids[draft], probs[draft])
            p = torch.where((is_tested & ~passes).unsqueeze(1), left, p)
        following = torch.where(has_moved, following, _draw(p, uniform[:, most]).squeeze(1))
        reached.append(torch.where(is_done | ~has_moved, -1, at))
        is_done = is_done | ~has_moved
    decided: list[list[int]] = torch.stack((*reached, following), 1).tolist()
    return [
        _tree_run(group, [row - start - 1 for row in of_group[:-1] if row >= 0], of_group[-1])
        for group, start, of_group in zip(groups, rows.starts, decided, strict=True)
    ]


def _child_rows(rows: Rows, trees: Sequence[Tokens]) -> list[list[int]]:
    """For each row the rows of what follows it in its tree, in order; filled with -1 up to the most that follow one."""
    children = [children_of(tree) for tree in trees]
    most = max(max(map(len, of_tree.values())) for of_tree in children)
    table = [[-1] * most for _ in range(rows.num_rows)]
    for start, of_tree in zip(rows.starts, children, strict=True):
        for parent, nodes in of_tree.items():
            table[start + 1 + parent][: len(nodes)] = [start + 1 + node for node in nodes]
    return table


def _tree_run(group: RowGroup, path: list[int], next_token: int) -> VerifiedRun:
    return VerifiedRun((*(group.draft[node] for node in path), next_token), len(path), tuple(path))


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
