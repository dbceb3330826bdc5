"""How far a run is from what its rule makes of given logits: by rounding a little, by a mistake further."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specdec.core.messages import Candidates
from specdec.sampling.acceptance import Decision
from specdec.sampling.noise import Purpose, uniforms
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import RowGroup, Rows

MOST_OFF = 2e-5
"""How far log probabilities may be from our own."""
MOST_SHORT = 3 * MOST_OFF
"""How far a run may be from our own logits' by rounding.

Where log probabilities are off by e, scores with noise are off by r e / T: T is the temperature and r the repetition
penalty, 0.8 and 1.1 at the most here. Of two scores that are compared both are: 2 r e / T. Probabilities are off by a
share of that, and so are acceptance ratios; sums of probabilities by r e / T at most, and where such a sum is compared
with a share of the whole sum both are. So nothing moves by more than 2.75 e against what it is compared with.
"""


@contextmanager
def rule_asked() -> Iterator[list[tuple[Any, ...]]]:
    """What our own target asks of its rule in the meantime: of each call the first arguments of :func:`shortfall`."""
    asked: list[tuple[Any, ...]] = []
    launch = Decision.launch

    def noted(self: Decision, logits: Tensor, *args: Any, **more: Any) -> None:
        asked.append((self._sampler, logits, self.groups, self._candidates))
        launch(self, logits, *args, **more)

    with patch.object(Decision, "launch", noted):
        yield asked


def shortfall(
    sampler: Sampler,
    logits: Tensor,
    groups: Sequence[RowGroup],
    candidates: Sequence[tuple[Candidates, ...]],
    *,
    run: Sequence[int],
    num_accepted: int,
) -> float:
    """By how much a run misses what its rule asks of each of its tokens.

    Under the coupled rule, by how much a token's score is below the best of its row. Under the rejection rule, in
    probability: how far u is on the wrong side of an acceptance ratio, and how far the drawn token's part of the
    distribution is from where u points.

    Args:
        sampler, logits, groups, candidates: As for ``decide`` of ``specdec.sampling.acceptance``, of one sequence.
        run: The accepted draft tokens, then the next token.
        num_accepted: How many of them are drafted.

    Returns:
        0 where the rule gives this run; infinite where no rounding makes it give it.
    """
    ((group,), (drawn_from,)) = groups, candidates
    if len(run) != num_accepted + 1 or tuple(run[:-1]) != group.draft[:num_accepted]:
        return math.inf
    if group.spec.sampling.acceptance == "coupled":
        goes_on = num_accepted < len(group.draft) and run[-1] == group.draft[num_accepted]
        return math.inf if goes_on else _below_the_best(sampler, logits, group, run)
    rows, probs = Rows([group]), sampler.probs(logits, [group]).double()
    uniform = uniforms(rows.seeds(), rows.positions(), Purpose.TARGET, "cpu")
    weights, worst = probs[num_accepted].clone(), 0.0
    for row, (token, drawn) in enumerate(zip(group.draft[: num_accepted + 1], drawn_from, strict=False)):
        drafted = dict(zip(drawn.ids, drawn.probs, strict=True))
        beyond = float(uniform[row, 0] * drafted[token] - probs[row, token])  # kept where it is below 0
        worst = max(worst, beyond if row < num_accepted else -beyond)
        if row == num_accepted:
            weights[list(drawn.ids)] -= torch.tensor(drawn.probs, dtype=torch.float64)
    weights = weights.clamp_min(0) if weights.clamp_min(0).sum() > 0 else probs[num_accepted]
    if probs[num_accepted, run[-1]] == 0:
        return math.inf
    end = float(weights[: run[-1] + 1].sum())
    goal = float(uniform[num_accepted, 1] * weights.sum())
    return max(worst, end - float(weights[run[-1]]) - goal, goal - end)


def _below_the_best(sampler: Sampler, logits: Tensor, group: RowGroup, run: Sequence[int]) -> float:
    ranked = sampler.choose_and_guess(logits, [group], sampler.vocab_size)
    scores, is_own = ranked.scores[: len(run)], ranked.tokens[: len(run)] == torch.tensor(run).unsqueeze(1)
    return float((scores[:, 0] - scores.masked_fill(~is_own, -torch.inf).amax(1)).max())
