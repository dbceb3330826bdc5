"""Who plans, by configuration."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.app import AppArgs
from deployments.router import planner_of
from specdec.core.messages import Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.controller import Controller
from specdec.drafting.plans import SEQUENTIAL_WAIT_S

SPEC = SequenceSpec(SamplingParams(), 1, 2, 30)


@pytest.mark.parametrize(
    ("keys", "plan"),
    [
        ({"num_speculative_tokens": 3, "speculation_mode": "outcomes", "num_branches": 5}, Plan(3, 5)),
        ({"num_speculative_tokens": 3, "speculation_mode": "outcomes", "num_branches": 0}, Plan(3)),
        ({"num_speculative_tokens": 3, "speculation_mode": "overlap"}, Plan(3)),
        ({"num_speculative_tokens": 3}, Plan(3)),
        (
            {"num_speculative_tokens": 3, "speculation_mode": "sequential"},
            Plan(3, mode="sequential", draft_wait_s=SEQUENTIAL_WAIT_S),
        ),
        ({"num_speculative_tokens": 0}, Plan()),
        ({"target": {"model": "some/target"}}, Plan()),
    ],
)
def test_a_fixed_length_is_every_sequences_plan(keys: dict[str, Any], plan: Plan) -> None:
    planner = planner_of(AppArgs(**keys))
    assert callable(planner)
    assert planner(SPEC) == plan


def chosen_by(args: AppArgs) -> Controller:
    planner = planner_of(args)
    assert isinstance(planner, Controller)
    return planner


@pytest.mark.parametrize(
    ("keys", "modes", "most"),
    [
        ({}, {"off", "sequential", "overlap", "outcomes"}, 16),
        ({"num_branches": 8}, {"off", "sequential", "overlap", "outcomes"}, 8),
        ({"speculation_mode": "overlap"}, {"off", "overlap"}, 16),
        ({"speculation_mode": "outcomes"}, {"off", "outcomes"}, 16),
        ({"speculation_mode": "sequential"}, {"off", "sequential"}, 16),
    ],
)
def test_auto_chooses_within_the_configuration(keys: dict[str, Any], modes: set[str], most: int) -> None:
    planner = chosen_by(AppArgs(**keys))
    assert (set(planner.bounds.modes), planner.bounds.num_branches) == (modes, most)


def test_no_branches_is_none_whatever_the_mode() -> None:
    planner = chosen_by(AppArgs(num_branches=0))
    assert {one.num_branches for one in planner.bounds.choices()} == {0}
