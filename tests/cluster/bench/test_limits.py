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
    one_chain_ahead,
    over_outcomes,
    scripted_hit_rate,
)
from specdec.engine.scripted import RANK_SHARES, Script

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


@pytest.mark.parametrize(("alpha", "c", "speed_up"), [(0.6, 0.05, 1.56), (0.8, 0.2, 2.28), (0.9, 0.1, 4.20)])
def test_one_chain_at_its_best_length(alpha: float, c: float, speed_up: float) -> None:
    assert max(1 / one_chain_ahead(alpha, c, k) for k in range(1, 40)) == pytest.approx(speed_up, abs=0.01)
    assert one_chain_ahead(1.0, 0.1, 5) == pytest.approx(1 / 5)


def accepted(rng: random.Random, alpha: float, num_draft_tokens: int) -> int:
    count = 0
    while count < num_draft_tokens and rng.random() < alpha:
        count += 1
    return count


def test_one_chain_with_dice() -> None:
    rng, alpha, c, length = random.Random(1), 0.7, 0.3, 4
    time, tokens, has_chain = 0.0, 0, False
    for _ in range(ROUNDS):
        time += max(1, length * c)
        if has_chain:
            count = accepted(rng, alpha, length)
            has_chain = count == length
            tokens += count + (not has_chain)
        else:
            tokens += 1
            has_chain = rng.random() < alpha
    assert one_chain_ahead(alpha, c, length) == pytest.approx(time / tokens, rel=0.02)


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


def test_hit_rate_by_hand() -> None:
    # One guess after a refusal, the draft's own token after all: .5 * (.9 * .7) + .5 * .5.
    assert scripted_hit_rate(0.5, 0.9, [1, 1], RANK_SHARES) == pytest.approx(0.5 * 0.63 + 0.5 * 0.5)
    # No branch for a refusal; own token and one guess after all.
    assert scripted_hit_rate(0.5, 0.9, [0, 2], RANK_SHARES) == pytest.approx(0.5 * (0.5 + 0.5 * 0.63))
    assert scripted_hit_rate(0.8, 1.0, [3, 3, 4], RANK_SHARES) == pytest.approx(1.0)


def test_hit_rate_of_the_scripted_backends() -> None:
    """The branches of the script itself, counted over many places in a text."""
    alpha, fan_outs = 0.8, [3, 2, 1, 2]
    script, hits = Script(alpha, 0.95, tuple(range(50))), 0
    for position in range(0, 4 * ROUNDS // 10, 4):
        drafts = [script.draft_tokens(5, position + i, 3) for i in range(4)]
        true = [script.true_token(5, position + i) for i in range(4)]
        kept = next((n for n in range(3) if drafts[n][0] != true[n]), 3)
        first = 0 if kept == 3 else 1  # a refused token is no guess for its own place
        hits += true[kept] in drafts[kept][first : first + fan_outs[kept]]
    rounds = 4 * ROUNDS // 10 // 4
    assert scripted_hit_rate(alpha, 0.95, fan_outs, RANK_SHARES) == pytest.approx(hits / rounds, abs=0.02)


def test_what_is_no_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="alpha must be in"):
        in_turn(1.2, 0.1, 4)
    with pytest.raises(ValueError, match="hit_rate must be in"):
        over_outcomes(0.5, 0.1, 4, -0.1)
    with pytest.raises(ValueError, match="mean_acceptance_length must be in"):
        alpha_of_length(5.5, 4)
