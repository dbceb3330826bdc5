"""Limits from a script, against the script itself played out without any system around it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.emulation import StepCost
from benchmarks.limits import ScriptedPair, main, scripted_limit
from benchmarks.scripted import Script
from specdec.drafting.branches import foreseen

STAND_IN = ("--backend", "benchmarks.backends:stand_in:target=30,draft=3,acceptance=0.8")
PAIR = ScriptedPair(0.8, 0.95, StepCost(30), StepCost(3))
TOKENS = 60_000


def played_out(pair: ScriptedPair, length: int, branches: int, waited_for: int, seed: int = 3) -> float:
    """Tokens per second of the policy on the script's own tokens."""
    script = Script(pair.alpha, pair.next_guess_rate, tuple(range(50)))
    draft_ms, time_ms, position, verified, is_miss = 1e3 * pair.draft_s(branches), 0.0, 0, 0, False
    while position < TOKENS:
        step_ms = 1e3 * pair.target_s(verified)
        time_ms += step_ms + is_miss * waited_for * draft_ms
        guesses = [script.draft_tokens(seed, position + i, branches) for i in range(verified + 2)]
        true = [script.true_token(seed, position + i) for i in range(verified + 2)]
        kept = next((n for n in range(verified) if guesses[n][0] != true[n]), verified)
        prepared = {(n, guesses[n][1 + j]) for n, j in foreseen(branches, verified, 0.8)}
        prepared.add((verified, guesses[verified][0]))
        is_miss = (kept, true[kept]) not in prepared
        position += kept + 1
        fit = int(step_ms / draft_ms + 1e-9) - (verified == 0)
        verified = waited_for if is_miss else max(0, min(length, fit))
    return 1e3 * position / time_ms


@pytest.mark.parametrize(
    ("length", "branches", "waited_for"),
    [(4, 16, 0), (8, 16, 0), (8, 16, 3), (8, 4, 0), (6, 0, 0), (12, 16, 0), (1, 2, 1)],
)
def test_against_the_script_played_out(length: int, branches: int, waited_for: int) -> None:
    limit = PAIR.outcomes(length, branches, waited_for)
    assert limit == pytest.approx(played_out(PAIR, length, branches, waited_for), rel=0.015)


def test_slow_and_growing_steps_against_the_script_played_out() -> None:
    """Seven draft steps fit, six after a plain step; a verification takes longer than a plain step."""
    pair = ScriptedPair(0.6, 0.7, StepCost(20, token_ms=0.5), StepCost(2, row_ms=0.1))
    assert pair.outcomes(12, 8) == pytest.approx(played_out(pair, 12, 8, 0), rel=0.015)


@pytest.mark.parametrize(("alpha", "c", "speed_up"), [(0.6, 0.05, 1.92), (0.8, 0.05, 3.09), (0.8, 0.2, 1.87)])
def test_published_speed_ups(alpha: float, c: float, speed_up: float) -> None:
    """In turn over plain decoding, at the best draft length."""
    pair = ScriptedPair(alpha, 0.0, StepCost(20), StepCost(20 * c))
    assert max(pair.sequential(k) for k in range(1, 30)) / pair.alone() == pytest.approx(speed_up, abs=0.01)


def test_by_hand() -> None:
    # One guess after a refusal, of which 70% of .95 are right; the chain itself after all.
    certain = ScriptedPair(0.5, 0.9, StepCost(10), StepCost(1))
    assert certain.hit_rate(0, 1) == pytest.approx(0.5 + 0.5 * 0.63)
    assert certain.hit_rate(1, 0) == pytest.approx(0.25)
    assert certain.sequential(2) == pytest.approx(1.75 / 0.012)
    assert certain.alone() == 100
    # Right always: every step but the first keeps four and adds one.
    assert ScriptedPair(1.0, 0.0, StepCost(10), StepCost(1)).outcomes(4, 0) == pytest.approx(500)
    # Two draft steps fit, one after a plain step.
    assert ScriptedPair(1.0, 0.0, StepCost(10), StepCost(5)).outcomes(4, 0) == pytest.approx(300)
    # Never right, never guessed: plain steps, or vain waiting.
    wrong = ScriptedPair(0.0, 0.0, StepCost(10), StepCost(1))
    assert wrong.outcomes(4, 16) == pytest.approx(100)
    assert wrong.outcomes(4, 16, 3) == pytest.approx(1000 / 13)


def test_streams_share_a_step() -> None:
    pair = ScriptedPair(0.8, 0.95, StepCost(30), StepCost(3), 64)
    assert pair.outcomes(6, 4) == pytest.approx(64 * PAIR.outcomes(6, 4))


def test_streams_share_the_branches_in_all() -> None:
    pair = ScriptedPair(0.8, 0.95, StepCost(30), StepCost(3, row_ms=0.001), 64)
    assert pair.outcomes(6, 16) == pair.outcomes(6, 4) > pair.outcomes(6, 3)


def test_sequential_at_its_best_length() -> None:
    assert PAIR.best_sequential() == PAIR.sequential(6) == pytest.approx(1e3 * (1 - 0.8**7) / 0.2 / 48)


def test_a_mode_and_its_best_length() -> None:
    limit = scripted_limit(PAIR, "outcomes", 6, 16)
    assert limit.tokens_per_s == PAIR.outcomes(6, 16) < limit.best_tokens_per_s
    assert limit.sequential_tokens_per_s == PAIR.best_sequential()
    assert scripted_limit(PAIR, "auto", None, 16).tokens_per_s == limit.best_tokens_per_s
    assert scripted_limit(PAIR, "sequential", 2, 0).tokens_per_s == PAIR.sequential(2)
    assert scripted_limit(PAIR, None, 0, 0).tokens_per_s == PAIR.alone()


def test_the_limits_stand_beside_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["target alone", "sequential, 2 draft tokens", "outcomes, 6 draft tokens", "auto"]
    rows = [{"variant": m, "num_streams": 2, "decode_tokens_per_s": 60.0, "tokens_per_round": 2.5} for m in variants]
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"rows": rows}))
    main([str(path), *STAND_IN])
    lines = capsys.readouterr().out.splitlines()[-4:]
    limits = [float(line.split(" | ")[3]) for line in lines]
    two = replace(PAIR, num_streams=2)
    expected = [two.alone(), two.sequential(2), two.outcomes(6, 16), scripted_limit(two, "auto", None, 16).tokens_per_s]
    assert limits == pytest.approx(expected, abs=0.05)
