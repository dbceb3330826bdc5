"""The coupled rule: a draft token is kept if and only if it is the token the target chooses with the shared noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from specdec.sampling.rows import RowGroup, Rows, VerifiedRun
from specdec.sampling.trees import children_of
from specdec.types import Tokens

_NO_TOKEN = -1


def verify_coupled(chosen: Tensor | Sequence[int], groups: Sequence[RowGroup]) -> list[VerifiedRun]:
    """What plain decoding would have given, as far as the draft foresaw it.

    Daliri, Musco and Suresh 2024, section 4. Row i was computed after the first i draft tokens, so its choice stands
    if all of those were chosen too: the run is the choices up to the first that differs from the draft.

    Args:
        chosen: int64 [N]: the target's token for every row, from ``Sampler.choose``.
        groups: The sequences of the N rows, in order.

    Returns:
        One entry per group. One transfer from the device for all of them.
    """
    rows = Rows(groups)
    choices = torch.as_tensor(chosen)
    drafts = list(chain.from_iterable((*group.draft, _NO_TOKEN) for group in groups))
    kept = choices == torch.tensor(drafts, device=choices.device)
    numbers: list[int] = torch.cat((choices, rows.leading(kept))).tolist()
    accepted = numbers[rows.num_rows :]
    return [
        VerifiedRun(tuple(numbers[start : start + num + 1]), num)
        for start, num in zip(rows.starts, accepted, strict=True)
    ]


def walk_coupled(chosen: Sequence[int], draft: Tokens, parents: Sequence[int]) -> VerifiedRun:
    """What plain decoding would have given, as far as a tree foresaw it: down by the target's own choices.

    All tokens at one place share its noise, so that the choice after a path is that of the chain of this path.

    Args:
        chosen: The target's token before the tree, then after each of its tokens.
        draft: The tree's tokens.
        parents: Which of them each one follows, -1 for none.
    """
    children, path = children_of(parents), [-1]
    while True:
        token = chosen[path[-1] + 1]
        follows = next((node for node in children.get(path[-1], ()) if draft[node] == token), None)
        if follows is None:
            return VerifiedRun((*(draft[node] for node in path[1:]), token), len(path) - 1, tuple(path[1:]))
        path.append(follows)
