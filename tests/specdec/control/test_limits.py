from __future__ import annotations

import itertools

import pytest

from specdec.control.choice import DRAFT_LENGTHS
from specdec.control.limits import OFF, Arm, Conditions, expected_tokens, guess_rate_of, hit_rate, pace
from specdec.control.steptimes import StepTime, StepTimes


def conditions(cost=0.1, rows=1, growth=0.0, **others):
    target = tuple(StepTime(rows, n * rows, 1 + growth * (n - 1), 9) for n in (1, 2, 4, 8, 16))
    draft = StepTimes((StepTime(rows, rows, cost, 9), StepTime(64, 64, cost, 9)))
    return Conditions(StepTimes(target), draft, rows, rows, **{"round_trip_s": 0.0, **others})


def test_tokens_of_a_verification():
    assert expected_tokens(0.8, 4) == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1


@pytest.mark.parametrize(("alpha", "cost", "speed_up"), [(0.6, 0.05, 1.92), (0.8, 0.05, 3.09), (0.8, 0.2, 1.87)])
def test_in_turn_at_its_best_draft_length(alpha, cost, speed_up):
    best = max(pace(Arm("in_turn", k), conditions(cost), alpha).tokens_per_s for k in range(1, 17))
    assert best == pytest.approx(speed_up, abs=0.01)


def test_latency_is_paid_in_turn_and_hidden_ahead():
    near, far = conditions(), conditions(round_trip_s=0.1)
    in_turn, ahead = Arm("in_turn", 4), Arm("outcomes", 4, 16)
    assert pace(in_turn, far, 0.8).round_s == pytest.approx(pace(in_turn, near, 0.8).round_s + 0.1)
    assert pace(ahead, far, 0.8) == pace(ahead, near, 0.8)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 0.95, 1.0])
def test_more_branches_hit_more_and_never_more_than_always(alpha):
    rates = [hit_rate(alpha, 6, branches, 0.9) for branches in (0, 1, 2, 4, 8, 16, 32)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(alpha**7)
    assert rates[-1] <= 1 + 1e-9
    assert hit_rate(0.0, 6, 3, 0.9) == pytest.approx(0.9)


def test_the_guess_rate_is_found_from_its_hits():
    for guess_rate in (0.3, 0.9):
        hits = hit_rate(0.8, 5, 16, guess_rate)
        assert guess_rate_of(hits, 0.8, 5, 16) == pytest.approx(guess_rate, abs=0.03)
    assert guess_rate_of(0.0, 0.8, 5, 16) == 0.05


def test_a_slow_drafter_does_not_fit_and_costs_nothing_then():
    slow = conditions(cost=1.0)
    assert pace(Arm("outcomes", 4, 8), slow, 0.9).tokens == 1
    assert pace(Arm("outcomes", 4, 8), slow, 0.9).round_s == pace(OFF, slow, 0.9).round_s
    waits = pace(Arm("outcomes", 4, 8, "branch"), slow, 0.9)
    assert waits.round_s >= 3  # for all but the last, as the part before that is offered


@pytest.mark.parametrize("arm", [Arm("outcomes", 2, 8), Arm("outcomes", 1, 4), Arm("outcomes", 6, 16)])
def test_a_draft_step_that_fits_almost_is_worth_almost_as_much(arm):
    fits = [1 + share / 20 for share in range(60)]  # of the shortest draft up
    paces = [pace(arm, conditions(0.96 / (fit + 1)), 0.8).tokens_per_s for fit in fits]
    assert all(0.999 <= more / less < 1.04 for less, more in itertools.pairwise(paces))


def test_a_row_that_waits_gets_half_a_chain_after_a_miss():
    arm = Arm("outcomes", 8, 4, "chain")
    given = pace(arm, conditions(0.3, guess_rate=0.0), 0.5)
    assert 4 <= given.num_draft_tokens < 4.2
    assert given.round_s == pytest.approx(1 + 4.5 * 0.3, rel=0.02)
    assert 1.9 < given.tokens < 1.95


@pytest.mark.parametrize("wait", ["no", "branch", "chain"])
@pytest.mark.parametrize("alpha", [0.3, 0.8, 0.95])
def test_ahead_is_between_plain_decoding_and_twice_in_turn(wait, alpha):
    for cost in (0.05, 0.1, 0.3):
        now = conditions(cost, guess_rate=1.0)
        best = max(pace(Arm("outcomes", k, 32, wait), now, alpha).tokens_per_s for k in DRAFT_LENGTHS)
        in_turn = max(pace(Arm("in_turn", k), now, alpha).tokens_per_s for k in range(1, 17))
        assert 0.9 <= best <= 2 * in_turn


def test_verification_that_costs_per_token_makes_long_drafts_worse():
    flat, bound = conditions(0.01), conditions(0.01, growth=1.0)
    long, short = Arm("in_turn", 8), Arm("in_turn", 1)
    assert pace(long, flat, 0.8).tokens_per_s > pace(short, flat, 0.8).tokens_per_s
    assert (
        pace(long, bound, 0.8).tokens_per_s < pace(short, bound, 0.8).tokens_per_s < pace(OFF, bound, 0.8).tokens_per_s
    )
