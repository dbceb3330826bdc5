"""Auto against every fixed plan and the target alone, in simulations whose truth the controller is not told."""

from __future__ import annotations

import statistics

import pytest

from specdec.protocol.messages import Plan
from tests.specdec.control.pairs import ONE_WAY_S, STEP_S, Scenario, Script
from tests.specdec.control.simulate import fixed, grid, line, measure


def check(results, least_over_best, least_over_alone):
    for result in results:
        assert result.over_alone >= least_over_alone, line(result)
        assert result.over_best >= least_over_best, line(result)


def test_the_simulated_pair_keeps_to_what_can_be_said_by_hand():
    scenario = Scenario(4, 0.8, 0.1, 0.9, is_compute_bound=False)
    script = Script(scenario, 0)
    plans = [Plan(), Plan(4, mode="in_turn", draft_wait_s=1.0), Plan(8, 8, 6, 0.8)]
    alone, in_turn, ahead = fixed(scenario, script, plans, 600)
    assert alone == pytest.approx(4 / STEP_S, rel=0.03)
    expected = 4 * (1 + 0.8 + 0.64 + 0.512 + 0.4096) / (STEP_S + 4 * 0.003 + 2 * ONE_WAY_S)
    assert in_turn == pytest.approx(expected, rel=0.05)
    assert in_turn < ahead < 2 * in_turn


@pytest.mark.parametrize(("batch", "every"), [(1, 13), (8, 13), (64, 26), pytest.param(64, 13, marks=pytest.mark.soak)])
def test_auto_keeps_up_with_the_best_fixed_plan(batch, every):
    results = measure(grid((batch,))[batch % 7 :: every])
    check(results, 0.92, 0.96)
    assert statistics.median(result.over_best for result in results) >= 0.97


@pytest.mark.soak
@pytest.mark.xfail(reason="at about a sixth of the points auto is 3 to 10 percent behind the best fixed plan")
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
def test_auto_keeps_up_everywhere(batch):
    check(measure(grid((batch,))), 0.97, 0.98)
