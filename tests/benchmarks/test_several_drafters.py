"""A target and several drafters on threads of their own, with bytes between them: the script's tokens, whoever dies."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import several_drafters
from benchmarks.scripted import ErringScript
from benchmarks.several_drafters import OUTCOMES, VOCABULARY, Swarm, Work, tokens_a_round
from specdec.core.messages import DRAFTER

HALF = [ErringScript(0.0, 0.0, VOCABULARY, number, 0.5) for number in range(2)]


def rates(correlation: float) -> tuple[float, float]:
    """How often the first of two drafters is right, and how often any is."""
    scripts = [ErringScript(0.0, 0.0, VOCABULARY, number, correlation) for number in range(2)]
    right = [[script.draft_tokens(3, i, 0)[0] == script.true_token(3, i) for script in scripts] for i in range(4000)]
    return sum(one for one, _ in right) / len(right), sum(map(any, right)) / len(right)


@pytest.mark.parametrize(("correlation", "of_both"), [(0.0, 0.85), (0.5, 0.815), (0.8, 0.775), (1.0, 0.7)])
def test_the_more_errors_are_correlated_the_less_a_second_drafter_knows(correlation: float, of_both: float) -> None:
    assert rates(correlation) == pytest.approx((0.7, of_both), abs=0.03)


def test_both_drafters_are_right_for_longer_than_one() -> None:
    work = Work(4, 200, "2", "0.5")
    assert tokens_a_round(HALF, work) > 1.1 * tokens_a_round(HALF[:1], work)


def test_tokens_are_the_scripts_while_a_drafter_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_drafters, "KILLED_EVERY_S", 0.1)
    monkeypatch.setattr(several_drafters, "REPLACED_AFTER_S", 0.1)

    async def decode() -> tuple[set[str], int]:
        swarm = Swarm(OUTCOMES, {DRAFTER: (HALF[0], "1"), "second": (HALF[1], "1")}, "5")
        await swarm.start()
        killing = asyncio.create_task(swarm.keep_killing("second"))
        deaths = swarm.router.counters.num_worker_deaths
        for seed in range(40):
            await swarm.decode([seed, 100 + seed], 50, None)
            names = {name for of_round in swarm.target.runs for name in of_round}
            if deaths["second"] > 1 and len(names) > 1:
                break
        killing.cancel()
        swarm.stop()
        return names, deaths["second"]

    names, num_deaths = asyncio.run(decode())
    assert names == {DRAFTER, "second"}
    assert num_deaths > 1
