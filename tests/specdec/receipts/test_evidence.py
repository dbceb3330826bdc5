"""The two tests of an audit: how often they flag what is honest, and how soon what is not."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.receipts.evidence import TIE, Rounding, first_excess, first_proved
from specdec.receipts.scoring import Scores

RNG = np.random.default_rng(0)


def scores(gaps: np.ndarray, margins: np.ndarray, logprobs: np.ndarray) -> Scores:
    return Scores(gaps, np.zeros((len(gaps), 2), np.int64), margins, logprobs)


@pytest.mark.parametrize("mean", [0.001, 0.02, 0.3])
def test_excesses_of_the_mean_that_is_allowed_are_proved_as_seldom_as_they_should(mean: float) -> None:
    alpha, num_answers = 0.05, 2000
    values = (RNG.random((num_answers, 300)) < mean).astype(float)
    proved = sum(first_proved(one, 1.0, mean, alpha) is not None for one in values)
    assert proved <= num_answers * alpha + 3 * np.sqrt(num_answers * alpha)


def test_dependence_does_not_help() -> None:
    """What has not more than the mean, given what came before, may else follow a plan: here it stops once ahead."""
    mean, alpha, flagged = 0.05, 0.05, 0
    for _ in range(1000):
        values, ahead = np.zeros(200), 0.0
        for i in range(200):
            size = 1.0 if ahead < 1 else 0.1
            values[i] = size * (RNG.random() < mean / size if size > mean else 0.0)
            ahead += values[i] - mean
        flagged += first_proved(values, 1.0, mean, alpha) is not None
    assert flagged <= 1000 * alpha + 3 * np.sqrt(1000 * alpha)


@pytest.mark.parametrize(("mean", "true"), [(0.002, 0.1), (0.03, 0.4)])
def test_more_excesses_than_allowed_are_proved_within_300_tokens(mean: float, true: float) -> None:
    values = (RNG.random((200, 300)) < true).astype(float)
    found = [first_proved(one, 1.0, mean, 1e-9) for one in values]
    assert sum(at is not None for at in found) >= 199


def test_one_excess_alone_is_not_proved_and_a_large_gap_is_found_where_it_is() -> None:
    values = np.zeros(300)
    values[17] = 9.0
    assert first_proved(values, 1.0, 0.01, 1e-6) is None
    assert first_excess(values, 8.0) == 17
    assert first_excess(values, 9.0) is None


def test_bounds_follow_what_two_readings_differ_by() -> None:
    rounding = Rounding()
    size, noise = 4000, 0.02
    margins = np.full(size, 3.0)
    first = scores(np.zeros(size), margins, np.zeros(size))
    second = scores(np.zeros(size), margins + RNG.normal(0, noise, size), RNG.normal(0, noise / 2, size))
    rounding.add(first, second, 1.0)
    bounds = rounding.bounds(100_000)
    assert 12 * noise < bounds.gap < 20 * noise
    assert bounds.logprob == pytest.approx(bounds.gap / 2, rel=0.1)
    assert 0.03 < bounds.mean_logprob < 0.2
    assert bounds.mean_gap < 0.05, "no token lacked anything"
    assert bounds.num_tokens == size
    # 100,000 honest differences of twice that scale: none is above the bound.
    assert first_excess(np.abs(RNG.normal(0, 2 * noise, 100_000)), bounds.gap) is None


def test_a_temperature_is_no_noise() -> None:
    """The same logits at temperature 0.1 have ten times the scores, and the same bounds."""
    found = []
    for temperature in (1.0, 0.1):
        rounding = Rounding()
        shift = np.random.default_rng(1).normal(0, 0.02, 1000)
        zeros = np.zeros(1000)
        rounding.add(scores(zeros, zeros, zeros), scores(zeros, shift / temperature, shift), temperature)
        found.append(rounding.bounds(1000))
    assert found[0].gap == pytest.approx(found[1].gap)


def test_equal_readings_leave_room_for_ties_alone() -> None:
    rounding = Rounding()
    same = scores(np.zeros(50), np.ones(50), np.zeros(50))
    rounding.add(same, same, 1.0)
    bounds = rounding.bounds(50)
    assert (bounds.gap, bounds.logprob) == (TIE, TIE)
    assert Rounding().bounds(0).mean_gap <= 0.5
