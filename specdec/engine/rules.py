"""The two acceptance rules side by side: a batch may hold sequences of both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specdec.protocol.messages import Candidates
from specdec.sampling.coupled import verify_coupled
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rejection import propose_truncated, verify_rejection
from specdec.sampling.rows import RowGroup, Rows, VerifiedRun


def verify(
    sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], candidates: Sequence[tuple[Candidates, ...]]
) -> list[VerifiedRun]:
    """Decide every group's run by the rule its request names.

    Args:
        sampler: Applies each request's parameters.
        logits: float32 [N, at least V], the target's.
        groups: The sequences of the N rows, in order.
        candidates: Per group, what each draft token was drawn from; empty under the coupled rule.
    """
    runs: list[VerifiedRun | None] = [None] * len(groups)
    coupled, rejection = _by_rule(groups)
    if coupled:
        part, rows = _part(logits, groups, coupled)
        for i, run in zip(coupled, verify_coupled(sampler.choose(rows, part), part), strict=True):
            runs[i] = run
    if rejection:
        part, rows = _part(logits, groups, rejection)
        drawn_from = [drawn for i in rejection for drawn in candidates[i]]
        ids, probs = _tensors(drawn_from, logits.device)
        for i, run in zip(rejection, verify_rejection(sampler.probs(rows, part), part, ids, probs), strict=True):
            runs[i] = run
    return [run for run in runs if run is not None]


def propose(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup]) -> list[tuple[int, Candidates | None]]:
    """Draw one draft token per group by the rule its request names; under rejection, with what it was drawn from.

    Args:
        sampler: Applies each request's parameters.
        logits: float32 [N, at least V], the draft's.
        groups: N sequences, one row each.
    """
    proposals: list[tuple[int, Candidates | None]] = [(0, None)] * len(groups)
    coupled, rejection = _by_rule(groups)
    if coupled:
        part, rows = _part(logits, groups, coupled)
        for i, token in zip(coupled, sampler.choose(rows, part).tolist(), strict=True):
            proposals[i] = token, None
    if rejection:
        part, rows = _part(logits, groups, rejection)
        draft = propose_truncated(sampler, rows, part)
        columns = zip(rejection, draft.tokens.tolist(), draft.ids.tolist(), draft.probs.tolist(), strict=True)
        for i, token, ids, probs in columns:
            proposals[i] = token, Candidates(tuple(ids), tuple(probs))
    return proposals


def _by_rule(groups: Sequence[RowGroup]) -> tuple[list[int], list[int]]:
    rejection = [i for i, group in enumerate(groups) if group.spec.sampling.acceptance == "rejection"]
    chosen = set(rejection)
    return [i for i in range(len(groups)) if i not in chosen], rejection


def _part(logits: Tensor, groups: Sequence[RowGroup], indexes: list[int]) -> tuple[list[RowGroup], Tensor]:
    """Some of the groups, and their rows; no copy where that is all of them."""
    if len(indexes) == len(groups):
        return list(groups), logits
    numbers = torch.tensor(Rows(groups).numbers(indexes), device=logits.device)
    return [groups[i] for i in indexes], logits[numbers]


def _tensors(candidates: Sequence[Candidates], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and probabilities, [draft tokens, widest]; shorter ones are filled with probability 0."""
    width = max(chain.from_iterable((len(drawn.ids), len(drawn.probs)) for drawn in candidates), default=1)
    ids = _filled([drawn.ids for drawn in candidates], width, np.int64)
    probs = _filled([drawn.probs for drawn in candidates], width, np.float32)
    return ids.to(device), probs.to(device)


def _filled(lists: Sequence[Sequence[float]], width: int, dtype: type[np.int64 | np.float32]) -> Tensor:
    """[number of lists, width], with zeros after the end of each."""
    filled = np.zeros((len(lists), width), dtype=dtype)
    lengths = np.array([len(values) for values in lists], dtype=np.int64)
    filled[np.arange(width) < lengths[:, None]] = [*chain.from_iterable(lists)]
    return torch.from_numpy(filled)
