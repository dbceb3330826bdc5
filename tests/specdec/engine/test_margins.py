"""What rounding may change is told from what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.sampling.acceptance import decide
from specdec.sampling.noise import gumbel
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.specdec.engine.margins import shortfall

LOG = [1, 0, 1]
POSITION = len(LOG)
AWAY = 1e-3


def spec_of(seed: int = 5) -> SequenceSpec:
    return SequenceSpec(SamplingParams(temperature=0.8), seed, POSITION, 9, ())


def away(question: tuple[Any, ...], *run: int) -> float:
    return shortfall(*question, run=run, num_accepted=len(run) - 1)


def test_a_score_beside_the_best() -> None:
    even = -gumbel([5, 5], [POSITION, POSITION + 1], 3, "cpu") * 0.8
    question = Sampler(3), even + torch.tensor([0.8 * AWAY, 0.0, -1.0]), [RowGroup(spec_of(), LOG, (0,))]
    assert decide(*question).runs[0].run == (0, 0)
    assert away(question, 0, 0) == 0
    assert (away(question, 1), away(question, 0, 1)) == pytest.approx((AWAY, AWAY), rel=1e-2)
    assert away(question, 0, 2) > 1
    assert away(question, 0) == away(question, 1, 0) == math.inf  # the first stops too early, the other was not drafted


def test_runs_are_no_further_away_than_logits_are() -> None:
    generator = torch.Generator().manual_seed(1)
    sampler, move, num_others = Sampler(40), 0.05, 0
    for seed in range(300):
        logits = torch.randn(3, 40, generator=generator)
        drafted = (2 + logits[:2, 2:].argmax(1)).tolist()
        groups = [RowGroup(spec_of(seed), LOG, tuple(drafted))]
        question = sampler, logits, groups
        moved = logits + move * (2 * torch.rand(3, 40, generator=generator) - 1)
        own, other = decide(*question).runs[0], decide(sampler, moved, groups).runs[0]
        assert away(question, *own.run) == 0
        if own != other:
            num_others += 1
            assert 0 < away(question, *other.run) < 3 * move
    assert num_others > 3
