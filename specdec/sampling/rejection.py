"""The classical rule of speculative sampling, with the draft's distribution cut to its most likely tokens.

Leviathan, Kalman and Matias 2023 (algorithm 1), Chen et al. 2023 (algorithm 2). The draft is drawn from the truncated
distribution, so that what travels, 32 ids and probabilities, is exactly what it was drawn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specdec.core.drafts import children_of, depths
from specdec.sampling.noise import Purpose, uniforms
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup, Rows, VerifiedRun, on_device

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
    target_probs: Tensor,
    groups: Sequence[RowGroup],
    draft_ids: Tensor,
    draft_probs: Tensor,
) -> list[VerifiedRun]:
    """Go down drafts by ratio tests, then draw the next token.

    A token x that was drawn from q is kept iff u q(x) < p(x), strictly, so that one the target never says does not
    pass. There p is the target's distribution; where a tree has several tokens at one place they are tested in turn,
    and after each one refused p is the positive part of p - q, normalised, or what it was where that has no mass. Where
    none is kept, or there is none, the next token is drawn from p: after full acceptance from the target at once. With
    temperature 0 all this comes to argmax equality. A draft token that has no probability in its own distribution
    cannot have been drawn from it: it is dropped with what follows, and its position decoded plainly. Miao et al. 2024,
    "SpecInfer", algorithm 2 (multi-step speculative sampling); Jeon et al. 2024, "Recursive speculative decoding", for
    children that are drawn without replacement. A chain is a tree in which one token follows each.

    Random numbers: of the pairs of (seed, position, TARGET) the first number of one for each test, and the second of
    the first pair for the draw.

    Args:
        target_probs: float32 [N, V], from ``Sampler.probs``; of a group 1 + T rows, before its draft and after each
            token.
        groups: The sequences of the N rows, in order.
        draft_ids: int64 [D, C]: what each draft token was drawn from, for all tokens of all drafts, in order.
        draft_probs: float32 [D, C]: and with which probabilities, summing to 1; of a tree given those before it that
            follow the same.

    Returns:
        One entry per group. One transfer from the device for all of them.
    """
    rows, device = Rows(groups), target_probs.device
    parents = [group.parents or range(-1, len(group.draft) - 1) for group in groups]
    drafts = _drafted(rows, parents, draft_ids.to(device), draft_probs.to(target_probs), target_probs.shape[1])
    num_places = 1 + max((max(depths(tree), default=0) for tree in parents), default=0)
    seeds = [group.spec.seed for group in groups] * num_places
    positions = [len(group.tokens) + place for place in range(num_places) for group in groups]
    most = drafts.child_rows.shape[1]
    numbers = uniforms(seeds, positions, Purpose.TARGET, device, most).view(num_places, len(groups), 2 * most)
    is_done = torch.zeros(len(groups), dtype=torch.bool, device=device)
    at = drafts.first_rows
    weights, by, reached = target_probs[at], torch.zeros(len(groups), dtype=torch.float64, device=device), []
    for uniform in numbers:
        at, has_moved, p = _step_down(drafts, target_probs[at], at, is_done, uniform)
        weights = torch.where(has_moved.unsqueeze(1), weights, p)
        by = torch.where(has_moved, by, uniform[:, most])
        is_done = is_done | ~has_moved
        reached.append(torch.where(is_done, -1, at))
    decided: list[list[int]] = torch.stack((*reached, _draw(weights, by).squeeze(1)), 1).tolist()
    return [
        _run(group, [row - start - 1 for row in of_group[:-1] if row >= 0], of_group[-1])
        for group, start, of_group in zip(groups, rows.starts, decided, strict=True)
    ]


class _Drafted(NamedTuple):
    """The drafts of G groups: N rows, D tokens in all.

    Attributes:
        first_rows: int64 [G]: each group's first row, before its draft.
        child_rows: int64 [N, most]: the rows of what follows each row in its draft, in order; filled up with -1.
        tokens: int64 [N]: the draft token of each row; 0 in first rows.
        ids: int64 [D + 1, C], what each draft token was drawn from, with a row of nothing for groups without a draft.
        probs: float32 [D + 1, C].
    """

    first_rows: Tensor
    child_rows: Tensor
    tokens: Tensor
    ids: Tensor
    probs: Tensor


def _drafted(rows: Rows, parents: Sequence[Sequence[int]], ids: Tensor, probs: Tensor, vocab_size: int) -> _Drafted:
    children = [children_of(tree) for tree in parents]
    most = max((len(nodes) for of_tree in children for nodes in of_tree.values()), default=1)
    first_rows, child_rows, tokens = on_device(
        ids.device,
        np.array(rows.starts, dtype=np.int64),
        np.array(_child_rows(rows, children, most), dtype=np.int64).reshape(-1, most),
        np.array([token for group in rows.groups for token in (0, *group.draft)], dtype=np.int64),
    )
    ids, probs = (functional.pad(values, (0, 0, 0, 1)) for values in _sane(ids, probs, vocab_size))
    return _Drafted(first_rows, child_rows, tokens, ids, probs)


def _step_down(
    drafts: _Drafted, p: Tensor, at: Tensor, is_done: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Test what follows the row of each of G groups in its draft, one child after the other, until one is kept.

    Args:
        drafts: Of all groups.
        p: float32 [G, V], the target's distribution after each row.
        at: int64 [G], the rows.
        is_done: bool [G]: groups that test nothing any more; they count as moved.
        uniform: float64 [G, at least most]: a number for each test.

    Returns:
        The rows reached, whether each group has moved, and p with what was refused taken away.
    """
    there, has_moved = at, is_done
    numbers = torch.arange(len(at), device=at.device)
    for number in range(drafts.child_rows.shape[1]):
        child = drafts.child_rows[there, number]
        # Before a row of group g there are as many first rows, which hold no draft, and that of g.
        draft, token = (child - numbers - 1).clamp_min(0), drafts.tokens[child.clamp_min(0)].unsqueeze(1)
        ids, probs = drafts.ids[draft], drafts.probs[draft]
        drawn = probs.masked_fill(ids != token, 0).sum(1)
        is_tested = ~has_moved & (child >= 0) & (drawn > 0)
        token = torch.where(drawn.unsqueeze(1) > 0, token, 0)
        left = p / p.sum(1, keepdim=True) if number else p
        passes = uniform[:, number] * drawn < left.gather(1, token).squeeze(1)
        at = torch.where(is_tested & passes, child, at)
        has_moved = has_moved | (is_tested & passes)
        p = torch.where((is_tested & ~passes).unsqueeze(1), _residual(left, ids, probs), p)
    return at, has_moved, p


def _child_rows(rows: Rows, children: Sequence[Mapping[int, list[int]]], most: int) -> list[list[int]]:
    """For each row the rows of what follows it in its draft, in order; filled up with -1 to ``most``."""
    table = [[-1] * most for _ in range(rows.num_rows)]
    for start, of_tree in zip(rows.starts, children, strict=True):
        for parent, nodes in of_tree.items():
            table[start + 1 + parent][: len(nodes)] = [start + 1 + node for node in nodes]
    return table


def _run(group: RowGroup, path: list[int], next_token: int) -> VerifiedRun:
    run = (*(group.draft[node] for node in path), next_token)
    return VerifiedRun(run, len(path), tuple(path) if group.parents else ())


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
