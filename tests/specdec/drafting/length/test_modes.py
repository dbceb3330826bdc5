"""Closed formulas: by hand, at their ends, and within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.drafting.length.modes import (
    DRAFT_LENGTHS,
    OFF,
    Bounds,
    Choice,
    Conditions,
    StepTime,
    StepTimes,
    best_by_mode,
    expected_tokens,
    guess_rate_of,
    hit_rate,
    pace,
)

FLAT = StepTimes((StepTime(1, 1, 0.03, 9), StepTime(1, 64, 0.03, 9)))


def conditions(draft_s=0.003, target=FLAT, rows=1, trip_s=0.0, guess_rate=0.5):
    return Conditions(target, target, StepTimes((StepTime(1, 1, draft_s, 9),)), rows, rows, trip_s, guess_rate)


def test_sequential_by_hand():
    expected = pace(Choice("sequential", 2), conditions(trip_s=0.004), 0.5)
    assert expected == pytest.approx(1.75 / (0.03 + 2 * 0.003 + 0.004))


def test_ahead_with_a_draft_that_is_always_right_every_round_has_one():
    for mode, branches in (("overlap", 0), ("outcomes", 4)):
        assert pace(Choice(mode, 4, branches), conditions(), 1.0) == pytest.approx(5 / 0.03)


def test_ahead_no_more_is_drafted_than_fits_into_a_step():
    fit = 0.03 / 0.008
    assert pace(Choice("overlap", 16), conditions(0.008), 1.0) == pytest.approx((1 + fit) / 0.03)
    assert pace(Choice("overlap", 4), conditions(0.07), 1.0) == pytest.approx(1 / 0.03)
    assert pace(Choice("overlap", 4), conditions(0.003, trip_s=0.04), 1.0) == pytest.approx(1 / 0.03)


def test_a_pass_that_gives_several_tokens_is_one_step_or_none():
    at_once = replace(conditions(0.008), num_step_tokens=8)
    assert pace(Choice("sequential", 8), at_once, 0.5) == pytest.approx(expected_tokens(0.5, 8) / (0.03 + 0.008))
    assert pace(Choice("sequential", 9), at_once, 0.5) == pytest.approx(expected_tokens(0.5, 9) / (0.03 + 2 * 0.008))
    assert pace(Choice("overlap", 16), at_once, 1.0) == pytest.approx(17 / 0.03)
    half_late = replace(conditions(0.02), num_step_tokens=8)
    assert pace(Choice("overlap", 16), half_late, 1.0) == pytest.approx(9 / 0.03)
    assert pace(Choice("overlap", 16), replace(conditions(0.04), num_step_tokens=8), 1.0) == pytest.approx(1 / 0.03)


def test_over_outcomes_a_miss_costs_a_plain_round():
    """Two states in balance: a draft follows a draft with chance h, and a plain round with chance h of that."""
    a, guess_rate, one = 0.5, 0.5, Choice("outcomes", 2, 2)
    after_draft, after_plain = (hit_rate(a, n, 2, guess_rate) for n in (2, 0))
    share = after_plain / (1 - after_draft + after_plain)
    assert pace(one, conditions(), a) == pytest.approx((1 + share * 0.75) / 0.03)
    # All kept and the next one right; refused at once, first or second guess.
    assert after_draft == pytest.approx(0.125 + 0.5 * 0.5 + 0.5 * 0.25)


@pytest.mark.parametrize("a", [0.1, 0.5, 0.9])
def test_more_branches_find_more_and_none_find_the_accepted_path(a):
    rates = [hit_rate(a, 4, branches, 0.6) for branches in (0, 2, 8, 64)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(a**5)
    assert rates[-1] <= 1
    assert guess_rate_of(hit_rate(a, 4, 8, 0.6), a, 4, 8) == pytest.approx(0.6, abs=0.03)


def test_expected_tokens():
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.5, 3) == pytest.approx(1.875)


def test_choices_keep_within_bounds():
    few = list(Bounds(5, 6).choices())
    assert few[0] == OFF
    assert {one.num_draft_tokens for one in few[1:]} == {1, 2, 3, 4, 5}
    assert {one.num_branches for one in few if one.mode == "outcomes"} == {2, 4, 6}
    assert {one.mode for one in Bounds(5, 0).choices()} == {"off", "sequential", "overlap"}
    assert {one.mode for one in Bounds(modes=frozenset({"off", "sequential"})).choices()} == {"off", "sequential"}
    assert list(Bounds(0).choices()) == [OFF]
    assert max(one.num_draft_tokens for one in Bounds(99).choices()) == DRAFT_LENGTHS[-1]


def test_of_equal_choices_the_one_that_drafts_least_is_the_best():
    best = {choice.mode: choice for choice in best_by_mode(conditions(0.008), 0.8, Bounds())}
    assert best["outcomes"].num_draft_tokens <= 4
    assert best["off"] == OFF
