from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specdec.control.choice import Bounds, arms, best, own_length, plan_of
from specdec.control.estimates import DecayedRate, Round, TrackedRate, acceptance_trials, rounds_of
from specdec.control.experience import Entry, Experience, tokens_of
from specdec.control.group import Allowance
from specdec.control.limits import OFF, Arm, Conditions
from specdec.control.steptimes import StepTime, StepTimes
from specdec.protocol.messages import Plan
from tests.specdec.control.test_limits import conditions


def test_bounds_leave_out_what_they_forbid():
    assert {arm.kind for arm in arms(Bounds())} == {"off", "in_turn", "overlap", "outcomes"}
    assert {arm.kind for arm in arms(Bounds(num_branches=0))} == {"off", "in_turn", "overlap"}
    assert {arm.num_branches for arm in arms(Bounds(num_branches=1))} == {0, 1}
    assert {arm.num_branches for arm in arms(Bounds(num_branches=7))} == {0, 2, 4}
    assert max(arm.num_draft_tokens for arm in arms(Bounds(num_draft_tokens=4))) == 4
    assert arms(Bounds(kinds=frozenset({"off"}))) == [OFF]


def test_another_arm_must_be_better_by_more_than_the_hysteresis():
    one, other = Arm("in_turn", 2), Arm("in_turn", 3)
    assert best({one: 1.0, other: 1.02}, one, 0.03) == one
    assert best({one: 1.0, other: 1.04}, one, 0.03) == other
    assert best({other: 1.0, OFF: 1.0}, other, 0.03) == OFF
    assert best({other: 1.05, OFF: 1.0}, other, 0.03) == other
    assert best({other: 1.04, OFF: 1.0}, other, 0.03) == OFF


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


def entry(arm, pace, *, rows=4, num_steps=400, tokens=None, at_s=0.0):
    """An arm's measurement; without ``tokens`` as many came as were to be expected."""
    rounds = rows * num_steps
    expected = pace * rounds
    return Entry(arm, rows, rows, 0.8, rounds, rounds, expected, expected if tokens is None else tokens * rounds, at_s)


def test_a_measured_arm_is_believed_and_speaks_for_others_the_more_the_more_alike_they_are():
    tried, near, far = Arm("outcomes", 4, 8), Arm("outcomes", 6, 8), Arm("outcomes", 16, 2)
    other, in_turn = Arm("outcomes", 4, 8, "chain"), Arm("in_turn", 4)
    experience = Experience().add(entry(tried, 0.8))
    beliefs = experience.beliefs([tried, near, far, other, in_turn, OFF], conditions(rows=4), 0.8, 0.0, lambda _: 1.0)
    means = [beliefs[arm].mean for arm in (tried, near, far, other)]
    assert means[0] == pytest.approx(math.log(0.8), abs=0.01)
    assert means == sorted(means)
    assert means[-1] < 0
    assert beliefs[in_turn].mean == beliefs[OFF].mean == 0
    errors = [beliefs[arm].error for arm in (tried, near, far, other)]
    assert errors == sorted(errors)
    assert errors[0] < 0.02 < 0.1 < errors[-1]


def test_an_arm_says_more_of_other_branches_than_of_other_lengths_and_a_wait_of_the_other_wait():
    tried = Arm("outcomes", 4, 8, "chain")
    others = [Arm("outcomes", 4, 16, "chain"), Arm("outcomes", 4, 8, "branch"), Arm("outcomes", 8, 8, "chain")]
    unlike = Arm("outcomes", 4, 8)
    beliefs = (
        Experience().add(entry(tried, 0.8)).beliefs([*others, unlike], conditions(rows=4), 0.8, 0.0, lambda _: 1.0)
    )
    means = [beliefs[arm].mean for arm in (*others, unlike)]
    assert means == sorted(means)
    assert means[1] < 0.7 * math.log(0.8)
    assert means[-1] > 0.3 * math.log(0.8)


def test_branches_tell_arms_apart_as_far_as_they_make_draft_steps_longer():
    tried, more = Arm("outcomes", 4, 2), Arm("outcomes", 4, 32)
    level, longer = (StepTimes((StepTime(4, 12, 0.1, 9), StepTime(4, 132, last_s, 9))) for last_s in (0.1, 0.4))
    experience = Experience().add(entry(tried, 0.8))
    alike, unlike = (
        experience.beliefs([more], replace(conditions(rows=4), draft=draft), 0.8, 0.0, lambda _: 1.0)[more]
        for draft in (level, longer)
    )
    assert alike.mean < 0.8 * math.log(0.8) < 0.4 * math.log(0.8) < unlike.mean
    assert alike.error < unlike.error


def test_arms_are_compared_at_one_acceptance_rate_unless_it_has_changed():
    lengths = {0: 20.0, 4: 80.0}
    then = Entry(Arm("overlap", 4), 1, 1, 0.8, 100.0, 100.0, tokens_of(lengths, 0.8), 300.0, 0.0, lengths)
    near, far = then.revised(0.81), then.revised(0.9)
    assert (near.acceptance_rate, near.expected) == (0.81, tokens_of(lengths, 0.81))
    assert far == then
    newer = then.add(then)
    assert newer.expected == pytest.approx(tokens_of(newer.lengths, 0.8))


def test_more_luck_is_granted_while_less_of_the_allowance_is_spent():
    assert [Allowance(credit, 3.0).share_left for credit in (-1.0, 0.0, 1.5, 3.0)] == [0.0, 0.0, 0.5, 1.0]
    assert Allowance().share_left == 0.0


def test_doubt_grows_with_time_and_with_another_load():
    arm = Arm("overlap", 4)
    experience = Experience().add(entry(arm, 0.8))
    now, later = (
        experience.beliefs([arm], conditions(rows=4), 0.8, at_s, lambda _: 1.0)[arm].error for at_s in (0.0, 600.0)
    )
    elsewhere = experience.beliefs([arm], conditions(rows=32), 0.8, 0.0, lambda _: 1.0)[arm].error
    assert now < later
    assert now < elsewhere


def test_a_pause_among_few_steps_condemns_no_arm():
    few = Experience().add(entry(OFF, 2 / 3, num_steps=2))  # one of two steps took twice as long
    many = Experience().add(entry(OFF, 2 / 3, num_steps=200))
    doubted, believed = (one.beliefs([OFF], conditions(rows=4), 0.8, 0.0, lambda _: 1.0)[OFF] for one in (few, many))
    assert doubted.mean + 1.5 * doubted.error > 0
    assert believed.mean + 3 * believed.error < math.log(0.75)


def test_the_tokens_that_came_count_in_the_long_run():
    arm = Arm("overlap", 4)
    few, many = entry(arm, 2.0, num_steps=5, tokens=1.0), entry(arm, 2.0, num_steps=10_000, tokens=1.0)
    assert few.log_pace == pytest.approx(math.log(2.0), abs=0.05)
    assert many.log_pace == pytest.approx(math.log(1.0), abs=0.05)
    again = many.add(entry(arm, 3.0, num_steps=800))
    assert again.log_pace == pytest.approx(math.log(3.0), abs=0.01)


def test_what_was_not_renewed_for_longest_is_forgotten():
    experience = Experience()
    for n in range(60):
        experience = experience.add(entry(Arm("overlap", 1 + n), 1.0))
    assert [one.arm.num_draft_tokens for one in experience.entries.values()] == list(range(21, 61))


def test_plans_carry_out_arms():
    now = conditions(0.1)
    assert plan_of(Arm("in_turn", 4), 0, now, 0.8) == Plan()
    assert plan_of(Arm("in_turn", 4), 3, None, 0.81) == Plan(3, acceptance_rate=0.8, mode="in_turn", draft_wait_s=1.0)
    ahead = plan_of(Arm("outcomes", 4, 8), 4, now, 0.8)
    assert (ahead.mode, ahead.num_branches, ahead.num_fit_steps, ahead.draft_wait_s) == ("overlap", 8, 5, 0)
    waits = plan_of(Arm("outcomes", 16, 8, "branch"), 16, now, 0.8)
    assert waits.num_fit_steps == 16
    assert 1.6 < waits.draft_wait_s < 2.0


@pytest.mark.parametrize(
    ("draft_s", "rows", "steps"),
    [(0.0015, 1, 14), (0.003, 1, 6), (0.003, 16, 8), (0.009, 1, 1), (0.02, 1, 1), (0.03, 1, 0)],
)
def test_an_offer_begins_early_enough_for_a_message_that_is_late(draft_s, rows, steps):
    """Of a target step of 30 ms 4 ms are left for it, where parts follow each other closely in whole draft steps."""
    target, draft = (StepTimes((StepTime(1, 1, s, 9),)) for s in (0.03, draft_s))
    now = Conditions(target, draft, rows, rows, round_trip_s=0.0)
    assert plan_of(Arm("outcomes", 16, 8), 16, now, 0.8).num_fit_steps == steps


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
