"""The formulas of the speculation modes: by hand, at their ends, and within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.core.types import SpeculationMode
from specdec.drafting.length import StepTime, StepTimes
from specdec.drafting.modes import (
    GUESS_RATE,
    OFF,
    Bounds,
    Choice,
    Conditions,
    expected_tokens,
    hit_rate,
    pace,
    paces,
)

FLAT = StepTimes((StepTime(1, 1, 0.03, 9), StepTime(1, 64, 0.03, 9)))
ONE = Conditions(FLAT, FLAT, FLAT, 1, 1, round_trip_s=0.0)


def conditions(draft_s: float = 0.003, target: StepTimes = FLAT, rows: int = 1, trip_s: float = 0.0) -> Conditions:
    draft = StepTimes((StepTime(1, 1, draft_s, 9),))
    return Conditions(target, target, draft, rows, rows, round_trip_s=trip_s)


def test_in_turn_by_hand() -> None:
    expected = pace(Choice("sequential", 2), conditions(trip_s=0.004), 0.5)
    assert expected == pytest.approx(1.75 / (0.03 + 2 * 0.003 + 0.004))


def test_every_round_has_a_draft_if_the_draft_is_always_right() -> None:
    modes: tuple[tuple[SpeculationMode, int], ...] = (("overlap", 0), ("outcomes", 4))
    for mode, branches in modes:
        assert pace(Choice(mode, 4, branches), conditions(), 1.0) == pytest.approx(5 / 0.03)


def test_no_more_is_drafted_than_fits_into_a_step() -> None:
    fit = 0.03 / 0.008
    assert pace(Choice("overlap", 16), conditions(0.008), 1.0) == pytest.approx((1 + fit) / 0.03)
    assert pace(Choice("overlap", 4), conditions(0.07), 1.0) == pytest.approx(1 / 0.03)
    assert pace(Choice("overlap", 4), conditions(0.003, trip_s=0.04), 1.0) == pytest.approx(1 / 0.03)


def test_a_pass_that_gives_several_tokens_is_one_step_or_none() -> None:
    at_once = replace(conditions(0.008), num_step_tokens=8)
    assert pace(Choice("sequential", 8), at_once, 0.5) == pytest.approx(expected_tokens(0.5, 8) / (0.03 + 0.008))
    assert pace(Choice("sequential", 9), at_once, 0.5) == pytest.approx(expected_tokens(0.5, 9) / (0.03 + 2 * 0.008))
    assert pace(Choice("overlap", 16), at_once, 1.0) == pytest.approx(17 / 0.03)
    half_late = replace(conditions(0.02), num_step_tokens=8)
    assert pace(Choice("overlap", 16), half_late, 1.0) == pytest.approx(9 / 0.03)
    assert pace(Choice("overlap", 16), replace(conditions(0.04), num_step_tokens=8), 1.0) == pytest.approx(1 / 0.03)


def test_a_missed_outcome_costs_a_plain_round() -> None:
    """Two states in balance: a draft follows a draft with chance h, and a plain round with chance h of that."""
    a, g = 0.5, GUESS_RATE
    after_draft, after_plain = (hit_rate(a, n, 2) for n in (2, 0))
    share = after_plain / (1 - after_draft + after_plain)
    assert pace(Choice("outcomes", 2, 2), conditions(), a) == pytest.approx((1 + share * 0.75) / 0.03)
    # All kept and the next one right; the first refused and guessed, or the second.
    assert after_draft == pytest.approx(0.125 + 0.5 * g + 0.25 * g)


@pytest.mark.parametrize("a", [0.1, 0.5, 0.9])
def test_more_branches_find_more_outcomes(a: float) -> None:
    rates = [hit_rate(a, 4, branches) for branches in (0, 2, 8, 64)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(a**5)
    assert rates[-1] <= 1


def test_expected_tokens() -> None:
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.5, 3) == pytest.approx(1.875)


def test_a_busy_drafter_does_not_slow_plain_decoding_down() -> None:
    slow = StepTimes((StepTime(1, 1, 0.09, 9), StepTime(1, 64, 0.09, 9)))
    assert pace(OFF, replace(ONE, target=slow), 0.5) == pytest.approx(1 / 0.03)


def test_choices_keep_within_bounds() -> None:
    assert set(paces(ONE, 0.5, Bounds(num_draft_tokens=0))) == {OFF}
    choices = list(paces(ONE, 0.5, Bounds(num_draft_tokens=5, num_branches=4, modes=frozenset({"outcomes"}))))
    assert choices[0] == OFF
    assert {choice.mode for choice in choices[1:]} == {"outcomes"}
    assert {choice.num_draft_tokens for choice in choices[1:]} == {1, 2, 3, 4, 5}
    assert {choice.num_branches for choice in choices[1:]} == {2, 4}
    lengths = [choice.num_draft_tokens for choice in choices]
    assert lengths == sorted(lengths), "those that draft least come first"
