"""How far a run is from what its rule makes of given logits: by rounding a little, by a mistake further."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specdec.sampling.acceptance import Decision
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup

MOST_OFF = 2e-5
"""How far log probabilities may be from our own."""
MOST_SHORT = 3 * MOST_OFF
"""How far a run may be from our own logits' by rounding.

Where log probabilities are off by e, scores with noise are off by r e / T: T is the temperature and r the repetition
penalty, 0.8 and 1.1 at the most here. Of two scores that are compared both are: 2 r e / T, or 2.75 e.
"""


@contextmanager
def rule_asked() -> Iterator[list[tuple[Any, ...]]]:
    """What our own target asks of its rule in the meantime: of each call the first arguments of :func:`shortfall`."""
    asked: list[tuple[Any, ...]] = []
    launch = Decision.launch

    def noted(self: Decision, logits: Tensor, *args: Any, **more: Any) -> None:
        asked.append((self._sampler, logits, self.groups))
        launch(self, logits, *args, **more)

    with patch.object(Decision, "launch", noted):
        yield asked


def shortfall(
    sampler: Sampler,
    logits: Tensor,
    groups: Sequence[RowGroup],
    *,
    run: Sequence[int],
    num_accepted: int,
) -> float:
    """By how much a run misses what its rule asks of each of its tokens.

    That is how far a token's score is below the best of its row.

    Args:
        sampler, logits, groups: As for ``decide`` of ``specdec.sampling.acceptance``, of one sequence.
        run: The accepted draft tokens, then the next token.
        num_accepted: How many of them are drafted.

    Returns:
        0 where the rule gives this run; infinite where no rounding makes it give it.
    """
    (group,) = groups
    if len(run) != num_accepted + 1 or tuple(run[:-1]) != group.draft[:num_accepted]:
        return math.inf
    goes_on = num_accepted < len(group.draft) and run[-1] == group.draft[num_accepted]
    return math.inf if goes_on else _below_the_best(sampler, logits, group, run)


def _below_the_best(sampler: Sampler, logits: Tensor, group: RowGroup, run: Sequence[int]) -> float:
    ranked = sampler.choose_and_guess(logits, [group], sampler.vocab_size)
    scores, is_own = ranked.scores[: len(run)], ranked.tokens[: len(run)] == torch.tensor(run).unsqueeze(1)
    return float((scores[:, 0] - scores.masked_fill(~is_own, -torch.inf).amax(1)).max())
