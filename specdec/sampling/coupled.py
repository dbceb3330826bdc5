"""The coupled rule: a draft token is kept if and only if it is the token the target chooses with the shared noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.types import Tokens
from specdec.sampling.rows import RowGroup, Rows, VerifiedRun


def verify_coupled(
    chosen: Tensor | Sequence[int], groups: Sequence[RowGroup], trees: Sequence[Tokens] | None = None
) -> list[VerifiedRun]:
    """What plain decoding would have given, as far as the draft foresaw it.

    Daliri, Musco and Suresh 2024, section 4.

    Args:
        chosen: int64 [N]: the target's token for every row, from ``Sampler.sample``.
        groups: The sequences of the N rows, in order.
        trees: As in :func:`walk_coupled`, for each group.

    Returns:
        One entry per group. One transfer from the device for all of them.
    """
    rows = Rows(groups)
    choices: list[int] = torch.as_tensor(chosen).tolist()
    return [
        walk_coupled(choices[start : start + count], group.draft, parents)
        for group, start, count, parents in zip(
            groups, rows.starts, rows.counts, trees or [()] * len(groups), strict=True
        )
    ]


def walk_coupled(chosen: Sequence[int], draft: Tokens, parents: Tokens = ()) -> VerifiedRun:
    """Down a draft by the target's own choices: a token is kept if what it follows was, and it was chosen there.

    All tokens at one place share its noise, so that the choice after a path is that of the chain of this path.

    Args:
        chosen: The target's token before the draft, then after each of its tokens.
        draft: The draft's tokens.
        parents: Of a tree, which of them each one follows, -1 for none; empty for a chain.
    """
    path: list[int] = []
    at = -1
    for node, parent in enumerate(parents or range(-1, len(draft) - 1)):
        if parent == at and draft[node] == chosen[at + 1]:
            path.append(node)
            at = node
    run = (*(draft[node] for node in path), chosen[at + 1])
    return VerifiedRun(run, len(path), tuple(path) if parents else ())
