"""What rounding may change is told from what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.core.messages import Candidates
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.sampling.acceptance import verify
from specdec.sampling.noise import Purpose, gumbel, uniforms
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.specdec.engine.margins import shortfall

LOG = [1, 0, 1]
POSITION = len(LOG)
AWAY = 1e-3


def spec_of(acceptance: str, seed: int = 5) -> SequenceSpec:
    return SequenceSpec(SamplingParams(temperature=0.8, acceptance=acceptance), seed, POSITION, 9, ())


def of_shares(*rows: tuple[float, ...]) -> Tensor:
    """Logits that give these probabilities at that temperature."""
    return torch.tensor(rows).log() * 0.8


def asked(logits: Tensor, acceptance: str, draft: tuple[int, ...] = (), *drawn: Candidates) -> tuple[Any, ...]:
    return Sampler(logits.shape[1]), logits, [RowGroup(spec_of(acceptance), LOG, draft)], [drawn]


def away(question: tuple[Any, ...], *run: int) -> float:
    return shortfall(*question, run=run, num_accepted=len(run) - 1)


@pytest.mark.parametrize("beyond", [AWAY, -AWAY])
def test_a_draw_beside_a_border(beyond: float) -> None:
    border = float(uniforms([5], [POSITION], Purpose.TARGET, "cpu")[0, 1]) + beyond
    question = asked(of_shares((border, 1 - border, 0.0)), "rejection")
    right, wrong = (0, 1) if beyond > 0 else (1, 0)
    assert verify(*question)[0].run == (right,)
    assert away(question, right) == 0
    assert away(question, wrong) == pytest.approx(AWAY, rel=1e-2)
    assert away(question, 2) == math.inf


@pytest.mark.parametrize("beyond", [AWAY, -AWAY])
def test_a_ratio_beside_its_number(beyond: float) -> None:
    number = float(uniforms([5], [POSITION], Purpose.TARGET, "cpu")[0, 0])
    share, drawn = 0.9 * number + beyond, Candidates((0, 1), (0.9, 0.1))
    question = asked(of_shares((share, 1 - share), (1.0, 0.0)), "rejection", (0,), drawn)
    right, wrong = ((0, 0), (1,)) if beyond > 0 else ((1,), (0, 0))
    assert verify(*question)[0].run == right
    assert away(question, *right) == 0
    assert away(question, *wrong) == pytest.approx(AWAY, rel=1e-2)


def test_a_score_beside_the_best() -> None:
    even = -gumbel([5, 5], [POSITION, POSITION + 1], 3, "cpu") * 0.8
    question = asked(even + torch.tensor([0.8 * AWAY, 0.0, -1.0]), "coupled", (0,))
    assert verify(*question)[0].run == (0, 0)
    assert away(question, 0, 0) == 0
    assert (away(question, 1), away(question, 0, 1)) == pytest.approx((AWAY, AWAY), rel=1e-2)
    assert away(question, 0, 2) > 1
    assert away(question, 0) == away(question, 1, 0) == math.inf  # the first stops too early, the other was not drafted


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_runs_are_no_further_away_than_logits_are(acceptance: str) -> None:
    generator = torch.Generator().manual_seed(1)
    sampler, move, num_others = Sampler(40), 0.05, 0
    for seed in range(300):
        logits = torch.randn(3, 40, generator=generator)
        drafted = (2 + logits[:2, 2:].argmax(1)).tolist()
        drawn = [Candidates((token, token - 1, token - 2), (0.5, 0.3, 0.2)) for token in drafted]
        groups = [RowGroup(spec_of(acceptance, seed), LOG, tuple(one.ids[0] for one in drawn))]
        question = sampler, logits, groups, [tuple(drawn) if acceptance == "rejection" else ()]
        moved = logits + move * (2 * torch.rand(3, 40, generator=generator) - 1)
        own, other = verify(*question)[0], verify(sampler, moved, *question[2:])[0]
        assert away(question, *own.run) == 0
        if own != other:
            num_others += 1
            assert 0 < away(question, *other.run) < 3 * move
    assert num_others > 3
