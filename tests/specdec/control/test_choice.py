from __future__ import annotations

import math

import pytest

from specdec.control.choice import Bounds, Corrections, arms, best, own_length, plan_of
from specdec.control.estimates import DecayedRate, Round, TrackedRate, acceptance_trials, rounds_of
from specdec.control.limits import OFF, Arm
from specdec.protocol.messages import Plan
from tests.specdec.control.test_limits import conditions


def test_bounds_leave_out_what_they_forbid():
    assert {arm.kind for arm in arms(Bounds())} == {"off", "in_turn", "overlap", "outcomes"}
    assert {arm.kind for arm in arms(Bounds(num_branches=0))} == {"off", "in_turn", "overlap"}
    assert max(arm.num_draft_tokens for arm in arms(Bounds(num_draft_tokens=4))) == 4
    assert arms(Bounds(kinds=frozenset({"off"}))) == [OFF]


def test_another_arm_must_be_better_by_more_than_the_hysteresis():
    one, other = Arm("in_turn", 2), Arm("in_turn", 3)
    assert best({one: 1.0, other: 1.02}, one, 0.03) == one
    assert best({one: 1.0, other: 1.04}, one, 0.03) == other
    assert best({other: 1.0, OFF: 1.0}, other, 0.03) == OFF
    assert best({other: 1.02, OFF: 1.0}, other, 0.03) == other
    assert best({other: 1.02, OFF: 1.0}, OFF, 0.03) == OFF


@pytest.mark.parametrize(
    ("rate", "price", "bound", "length"),
    [
        (0.8, 0.0, None, 6),
        (0.8, 0.5, None, 3),
        (0.8, 0.9, None, 0),
        (0.8, 0.0, 2, 2),
        (0.8, 0.0, 0, 0),
        (0.8, 0.0, 9, 6),
    ],
)
def test_a_sequences_own_length(rate, price, bound, length):
    assert own_length(Arm("overlap", 6), rate, price, bound) == length


def test_corrections_stand_for_the_arm_and_downwards_for_its_style():
    tried, alike, unlike = Arm("outcomes", 4, 8), Arm("outcomes", 6, 8), Arm("outcomes", 4, 8, "chain")
    factors = Corrections().add(tried, 1e6, math.log(0.8)).factors([tried, alike, unlike, OFF])
    assert factors[tried] == pytest.approx(0.8, abs=0.01)
    assert factors[alike] == pytest.approx(0.8, abs=0.02)
    assert factors[unlike] == factors[OFF] == 1
    factors = Corrections().add(tried, 1e6, math.log(1.2)).factors([tried, alike])
    assert (factors[tried], factors[alike]) == (pytest.approx(1.2, abs=0.01), 1)
    assert Corrections().add(tried, 2, math.log(0.5)).factors([tried])[tried] > 0.9


def test_plans_carry_out_arms():
    now = conditions(0.1)
    assert plan_of(Arm("in_turn", 4), 0, now, 0.8) == Plan()
    assert plan_of(Arm("in_turn", 4), 3, None, 0.81) == Plan(3, acceptance_rate=0.8, mode="in_turn", draft_wait_s=1.0)
    ahead = plan_of(Arm("outcomes", 4, 8), 4, now, 0.8)
    assert (ahead.mode, ahead.num_branches, ahead.num_fit_steps, ahead.draft_wait_s) == ("overlap", 8, 5, 0)
    waits = plan_of(Arm("outcomes", 16, 8, "branch"), 16, now, 0.8)
    assert waits.num_fit_steps == 16
    assert 1.6 < waits.draft_wait_s < 2.0


def test_acceptance_is_per_judged_token_whatever_the_draft_length():
    assert acceptance_trials([Round(4, 4), Round(4, 1), Round(0, 0)]) == (5, 6)
    assert rounds_of("aab" + "p" + "c" + "aa", (0, 0, 2, 0, 3, 0, 2)) == [
        Round(2, 2),
        Round(0, 0),
        Round(3, 0),
        Round(2, 2),
    ]


def test_rates_forget_slowly_and_at_once_when_they_are_contradicted():
    steady = TrackedRate()
    for _ in range(400):
        steady = steady.add(4, 5)
    assert steady.rate(0.5, 4) == pytest.approx(0.8, abs=0.01)
    for _ in range(8):
        steady = steady.add(0, 5)
    assert steady.rate(0.5, 4) < 0.5
    assert DecayedRate().rate(0.7, 4) == pytest.approx(0.7)
    assert DecayedRate(memory=10).add(0, 100).add(10, 10).rate(0.5, 1) > 0.9
