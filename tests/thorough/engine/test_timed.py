"""Overlap over the likely outcomes, on a virtual clock: nothing here depends on the machine that runs it."""

from __future__ import annotations

import pytest

from benchmarks.emulation import StepCost
from benchmarks.limits import ScriptedPair
from benchmarks.scripted import Script
from specdec.core.messages import Plan
from tests.specdec.engine.timed import PROMPT, TimedService, one_way

SCRIPT = Script(0.8, 0.95, tuple(range(200)))
PAIR = ScriptedPair(0.8, 0.95, StepCost(30), StepCost(3))
SEEDS, TOKENS = range(4), 512


def rate(plan: Plan, one_way_s: float, draft_s: float = 0.003, spread: float = 0.3) -> float:
    """Tokens per second of one stream, the mean over a few texts."""
    rates = []
    for seed in SEEDS:
        service = TimedService(plan, SCRIPT, {"target": 0.030, "drafter": draft_s}, one_way(one_way_s, seed, spread))
        rates.append(service.run(1, TOKENS, seed))
        (came,) = service.arrivals.values()
        said = [token for _, tokens in came for token in tokens]
        assert said == [SCRIPT.true_token(seed, len(PROMPT) + i) for i in range(TOKENS)]
    return sum(rates) / len(rates)


@pytest.fixture(scope="module")
def without_latency() -> float:
    """These texts' own limit: luck counts for some percent of it."""
    return rate(Plan(8, 16), 1e-5, 0.0025)


def test_without_latency_it_comes_to_the_limit(without_latency: float) -> None:
    assert without_latency == pytest.approx(PAIR.outcomes(8, 16), rel=0.04)


@pytest.mark.parametrize("one_way_ms", [0.5, 1.5, 2.5])
def test_one_way_times_are_hidden(one_way_ms: float, without_latency: float) -> None:
    """Twice as much lies between target and drafter, and again on the way back."""
    assert rate(Plan(8, 16), one_way_ms / 1e3) > (0.97 if one_way_ms < 1 else 0.9) * without_latency


def test_a_draft_that_does_not_fit_is_used_as_far_as_it_came() -> None:
    """A draft of 10 takes longer than a step: sent only when finished it would miss every boundary."""
    assert rate(Plan(10, 16), 2e-3) > 0.95 * rate(Plan(6, 16), 2e-3)


def test_against_drafting_sequential_and_the_target_alone() -> None:
    outcomes = rate(Plan(8, 16), 1.5e-3)
    sequential = max(rate(Plan(k, mode="sequential", draft_wait_s=1.0), 1.5e-3) for k in (6, 8))
    assert outcomes > 1.6 * sequential
    assert outcomes > 1.35 * PAIR.best_sequential()
    assert outcomes > 3.6 * PAIR.alone()
