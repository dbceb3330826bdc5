"""Who plans, by configuration."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import AppArgs
from deployments.router import planner_of
from specdec.control.controller import Controller
from specdec.control.deadlines import Deadlines
from specdec.protocol.messages import Plan
from specdec.sampling.params import SamplingParams, SequenceSpec

SPEC = SequenceSpec(SamplingParams(), 1, 2, 30)


@pytest.mark.parametrize(
    ("keys", "plan"),
    [
        ({"num_speculative_tokens": 3, "num_branches": 5}, Plan(3, 5)),
        ({"num_speculative_tokens": 3, "mode": "overlap"}, Plan(3)),
        ({"num_speculative_tokens": 0}, Plan()),
        ({"target": {"model": "some/target"}}, Plan()),
    ],
)
def test_a_fixed_length_is_every_sequences_plan(keys: dict[str, Any], plan: Plan) -> None:
    planner = planner_of(AppArgs(**keys))
    assert not isinstance(planner, Controller)
    assert isinstance(planner, Deadlines) == ("num_speculative_tokens" in keys)
    assert (planner.opened("s", SPEC) if isinstance(planner, Deadlines) else planner(SPEC)) == plan


@pytest.mark.parametrize(
    ("keys", "kinds", "most"),
    [
        ({}, {"off", "in_turn", "overlap", "outcomes"}, 32),
        ({"num_branches": 8}, {"off", "in_turn", "overlap", "outcomes"}, 8),
        ({"mode": "overlap"}, {"off", "overlap", "outcomes"}, 32),
        ({"mode": "in_turn"}, {"off", "in_turn"}, 32),
    ],
)
def test_auto_chooses_within_the_configuration(keys: dict[str, Any], kinds: set[str], most: int) -> None:
    planner = planner_of(AppArgs(**keys))
    assert isinstance(planner, Controller)
    assert (planner.bounds.kinds, planner.bounds.num_branches) == (kinds, most)
