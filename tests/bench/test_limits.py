"""Limits against values worked out by hand, and against the same process played out with dice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from cluster.bench.compare import ALONE, Comparison, Mode, ServiceMode, Work, parse_modes
from cluster.bench.measures import Arrival, DeviceUse, Run, Stream
from cluster.bench.summary import summarize
from tests.bench.limits import (
    MissPolicy,
    alpha_of_length,
    expected_tokens,
    in_turn,
    limit_of,
    main,
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


def test_a_table_beside_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten plain rounds of 30 ms in 0.4 s; then five rounds of 36 ms with drafts of 2 ms steps in 0.3 s."""
    plain = Stream("a" * 10, tuple(Arrival(0.04 * i, 1) for i in range(1, 11)))
    drafted = Stream("a" * 10, tuple(Arrival(0.06 * i, 2) for i in range(1, 6)), 4, 16, 5)
    alone = Run((plain,), 0.4, devices={"target": DeviceUse(0.4, 0.3, 10)})
    devices = {"target": DeviceUse(0.3, 0.18, 5), "draft": DeviceUse(0.3, 0.04, 20)}
    run = Run((drafted,), 0.3, devices=devices)
    modes = parse_modes(["in_turn", "overlap"], [0, 4])
    rows = [asdict(row) for row in summarize(Comparison(Work("code", 1, 10, 0.0), modes, ((alone,), (run,), (run,))))]
    limits = [limit_of(row, 0.03) for row in rows[1:]]
    assert all(limits)
    assert [limit.verify_cost for limit in limits] == pytest.approx([36 / 30] * 2)
    assert limits[0].draft_cost == pytest.approx(2 / 30)
    assert [limit.tokens_per_s for limit in limits] == pytest.approx([2.25 / (0.036 + 4 * 0.002), 2.25 / 0.036])
    assert limits[1].hit_rate == 1
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"rows": rows}))
    main([str(path)])
    told = [line.split(" | ")[5] for line in capsys.readouterr().out.splitlines()[2:]]
    assert told == [f"{rate:.1f}" for rate in (1 / 0.03, limits[0].tokens_per_s, limits[1].tokens_per_s)]


@pytest.mark.parametrize(("mode", "num_hits", "hit_rate"), [("overlap", 0, 0.5), ("outcomes", 8, 0.8), (None, 0, 0.5)])
def test_plain_steps_are_not_charged_as_verifications(mode: ServiceMode | None, num_hits: int, hit_rate: float) -> None:
    """Steps of 30 ms without a draft and of 60 ms with one, in half of the rounds: 45 ms on average."""
    plain = Stream("a" * 10, tuple(Arrival(0.03 * i, 1) for i in range(1, 11)))
    drafted = Stream("a" * 31, (Arrival(0.03, 1), Arrival(0.48, 30)), 5, 20, 20)
    alone = Run((plain,), 0.3, devices={"target": DeviceUse(0.3, 0.3, 10)})
    target = DeviceUse(0.48, 0.45, 10, num_hits=num_hits, num_misses=2 if num_hits else 0)
    run = Run((drafted,), 0.48, devices={"target": target, "draft": DeviceUse(0.48, 0.08, 40)})
    modes = (Mode(ALONE, 0), parse_modes([mode] if mode else [], [4])[0])
    _, row = summarize(Comparison(Work("code", 1, 31, 0.0), modes, ((alone,), (run,))))
    limit = limit_of(asdict(row), 0.03)
    assert limit is not None
    assert (row.hit_rate, limit.hit_rate) == (0.5, hit_rate)
    assert row.foreseen == (num_hits / 10 if num_hits else None)
    assert limit.verify_cost == pytest.approx(2)
    tokens, step_s = hit_rate * 5 + (1 - hit_rate), hit_rate * 0.06 + (1 - hit_rate) * 0.03
    assert limit.tokens_per_s == pytest.approx(tokens / step_s)
    if hit_rate == 0.5:
        assert step_s == pytest.approx(0.045)
        assert row.decode_tokens_per_s / limit.tokens_per_s == pytest.approx(1)


def test_over_outcomes_the_limit_takes_drafts_as_whole_and_in_time() -> None:
    """Late drafts were shorter than asked for, and missing in half of the rounds; the branches were right in 3 of 4."""
    plain = Stream("a" * 10, tuple(Arrival(0.03 * i, 1) for i in range(1, 11)))
    drafted = Stream("a" * 10, tuple(Arrival(0.06 * i, 2) for i in range(1, 6)), 4, 4, 2)
    alone = Run((plain,), 0.3, devices={"target": DeviceUse(0.3, 0.3, 10)})
    devices = {"target": DeviceUse(0.3, 0.24, 8, num_hits=6, num_misses=2), "draft": DeviceUse(0.3, 0.04, 8)}
    run = Run((drafted,), 0.3, devices=devices)
    modes = (Mode(ALONE, 0), Mode("outcomes, 12 draft tokens", 12, "outcomes"))
    _, row = summarize(Comparison(Work("code", 1, 10, 0.0), modes, ((alone,), (run,))))
    limit = limit_of(asdict(row), 0.03)
    assert limit is not None
    assert (limit.hit_rate, limit.alpha) == (0.75, pytest.approx(0.5))
    # Six steps of 5 ms fit into one of 30 ms; a seventh token would come half as often as it costs.
    assert limit.num_draft_tokens == 6
    tokens_per_round = 0.75 * (2 - 0.5**6) + 0.25
    assert limit.tokens_per_s == pytest.approx(tokens_per_round / 0.03)
