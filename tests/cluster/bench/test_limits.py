"""Limits against values worked out by hand, and against the same process played out with dice."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cluster.bench.limits import (
    MissPolicy,
    alpha_of_length,
    expected_tokens,
    in_turn,
    over_outcomes,
)

ROUNDS = 40_000


def test_expected_tokens() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == expected_tokens(0.9, 0) == 1


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_alpha_from_a_mean_length(alpha: float) -> None:
    assert alpha_of_length(expected_tokens(alpha, 5), 5) == pytest.approx(alpha, abs=1e-9)


def test_by_hand() -> None:
    assert in_turn(0.8, 0.1, 4) == pytest.approx(1.4 / 3.3616)
    assert in_turn(0.8, 0.1, 4, verify_cost=1.2, round_trip=0.15) == pytest.approx(1.75 / 3.3616)
    # Waiting for a whole new chain: [h max(1, Kc) + (1 - h)(1 + Kc)] / E.
    assert over_outcomes(0.5, 0.25, 2, 0.8, miss=MissPolicy(2)) == pytest.approx((0.8 * 1 + 0.2 * 1.5) / 1.75)
    # Going on plainly: one token more in one step.
    assert over_outcomes(0.5, 0.25, 2, 0.8) == pytest.approx(1 / (0.8 * 1.75 + 0.2))
    # The same with drafting that takes longer than a step: the next chains are ready after 1.2 steps.
    assert over_outcomes(0.5, 0.6, 2, 0.8) == pytest.approx(1.2 / (0.8 * 1.75 + 0.2))
    # Waiting for one token; drafting two takes longer than a step.
    time, tokens = 0.8 * 1.2 + 0.2 * 1.7, 0.8 * 1.75 + 0.2 * 1.5
    policy = MissPolicy(1, verify_cost=1.1)
    assert over_outcomes(0.5, 0.6, 2, 0.8, verify_cost=1.05, miss=policy) == pytest.approx(time / tokens)
    assert over_outcomes(0.8, 0.1, 6, 1.0) == pytest.approx(1 / expected_tokens(0.8, 6))
    assert over_outcomes(0.8, 0.1, 6, 0.0) == 1


@pytest.mark.parametrize(("alpha", "c", "speed_up"), [(0.6, 0.05, 1.92), (0.8, 0.05, 3.09), (0.8, 0.2, 1.87)])
def test_in_turn_at_its_best_length(alpha: float, c: float, speed_up: float) -> None:
    """Published speed-ups over plain decoding at the best draft length."""
    assert max(1 / in_turn(alpha, c, k) for k in range(1, 30)) == pytest.approx(speed_up, abs=0.01)


def accepted(rng: random.Random, alpha: float, num_draft_tokens: int) -> int:
    count = 0
    while count < num_draft_tokens and rng.random() < alpha:
        count += 1
    return count


@pytest.mark.parametrize(
    ("miss", "miss_time"),
    [(MissPolicy(), lambda c: max(1, 4 * c)), (MissPolicy(2, 1.1), lambda c: 1.1 + 2 * c)],
)
def test_outcomes_with_dice(miss: MissPolicy, miss_time: Callable[[float], float]) -> None:
    rng, alpha, c, hit_rate = random.Random(2), 0.8, 0.2, 0.7
    time, tokens = 0.0, 0
    for _ in range(ROUNDS):
        is_hit = rng.random() < hit_rate
        time += max(1.3, 4 * c) if is_hit else miss_time(c)
        tokens += 1 + accepted(rng, alpha, 4 if is_hit else miss.num_draft_tokens)
    limit = over_outcomes(alpha, c, 4, hit_rate, verify_cost=1.3, miss=miss)
    assert limit == pytest.approx(time / tokens, rel=0.02)


def test_what_is_no_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="alpha must be in"):
        in_turn(1.2, 0.1, 4)
    with pytest.raises(ValueError, match="hit_rate must be in"):
        over_outcomes(0.5, 0.1, 4, -0.1)
    with pytest.raises(ValueError, match="mean_acceptance_length must be in"):
        alpha_of_length(5.5, 4)
