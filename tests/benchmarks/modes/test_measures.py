"""Figures against the same ones worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.modes.compare import ALONE, Comparison, Variant, Work
from benchmarks.modes.measures import (
    DeviceUse,
    Run,
    Stream,
    TokenArrival,
    device_use,
    mean,
    percentiles_s,
    token_gaps_s,
    tokens_per_round,
)
from benchmarks.modes.summary import summarize
from specdec.drafting.plans import WorkerKind
from specdec.engine.observed import StepRecord
from specdec.engine.results import SpecStats

ARRIVALS = (TokenArrival(0.5, 2), TokenArrival(0.8, 1), TokenArrival(1.4, 3))
STREAM = Stream("abcdef", ARRIVALS, SpecStats(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=3))
"""Six tokens in three rounds: 1 + 1 accepted, plain, 1 + 2 accepted."""


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    assert token_gaps_s(ARRIVALS) == pytest.approx([0.0, 0.3, 0.6, 0.0, 0.0])
    assert mean(token_gaps_s(ARRIVALS)) == pytest.approx((1.4 - 0.5) / 5)
    assert token_gaps_s([TokenArrival(1.0, 1)]) == []
    assert token_gaps_s([TokenArrival(1.0, 1), TokenArrival(2.0, 0), TokenArrival(3.0, 1)]) == pytest.approx([2.0])


def test_percentiles_are_interpolated() -> None:
    gaps = [i / 1000 for i in range(101)]
    assert percentiles_s(reversed(gaps)) == pytest.approx((0.050, 0.095, 0.099))
    assert percentiles_s([0.0, 1.0]) == pytest.approx((0.5, 0.95, 0.99))
    assert percentiles_s([0.25]) == (0.25, 0.25, 0.25)
    assert percentiles_s([]) == (0.0, 0.0, 0.0)


def test_a_stream() -> None:
    assert STREAM.num_tokens == 6
    assert STREAM.num_rounds == 3
    assert STREAM.first_s == 0.5
    assert STREAM.decode_tokens_per_s == pytest.approx(4 / 0.9)
    assert Stream("a", (TokenArrival(0.5, 1),)).decode_tokens_per_s == 0


def test_a_run() -> None:
    run = Run((STREAM, Stream("xy", (TokenArrival(0.25, 1), TokenArrival(0.5, 1)))), duration_s=1.6)
    assert run.num_tokens == 8
    assert run.tokens_per_s == pytest.approx(5.0)
    assert run.decode_tokens_per_s == pytest.approx(4 / 0.9 + 4)
    assert run.texts == ("abcdef", "xy")


def test_acceptance_is_pooled_over_streams_and_rounds() -> None:
    other = Stream("xyz", (TokenArrival(1, 3),), SpecStats(num_drafts=1, num_draft_tokens=2, num_accepted_tokens=2))
    plain = Stream("xyz", (TokenArrival(1, 3),))
    variants = (Variant(ALONE, 0), Variant("overlap", 4, "overlap"))
    runs = ((Run((plain, plain), 1.0),), (Run((STREAM, other), 1.0),))
    alone, row = summarize(Comparison(Work("code", 2, 6, 0.0), variants, runs))
    assert (row.acceptance_rate, row.mean_acceptance_length) == (pytest.approx(5 / 10), pytest.approx(1 + 5 / 3))
    assert (alone.acceptance_rate, alone.mean_acceptance_length) == (None, None)
    assert tokens_per_round([STREAM]) == pytest.approx(5 / 2)
    assert tokens_per_round([Stream("", (TokenArrival(0.1, 1),))]) is None


def step(role: WorkerKind, start_s: float, end_s: float, *, is_decode: bool = True) -> StepRecord:
    start_ns, end_ns = round(1e9 * start_s), round(1e9 * end_s)
    return StepRecord(role, start_ns, end_ns, start_ns, 1, 1, 0, is_decode=is_decode, goes_on=False, num_passes=1)


def test_devices_from_their_steps() -> None:
    steps = [
        step("target", 0.0, 0.4, is_decode=False),
        step("drafter", 0.3, 0.5),
        step("target", 0.6, 0.7),
        step("target", 0.7, 0.9),
    ]
    use = device_use(steps, 2.0)
    assert use["target"].num_steps == 3
    assert use["target"].busy_s == pytest.approx(0.7)
    assert use["target"].idle_share == pytest.approx(0.65)
    assert use["target"].step_s == pytest.approx(0.15), "a step that reads a prompt is no measure of decoding"
    assert use["draft"].idle_share == pytest.approx(0.9)


def test_a_device_known_by_its_counters_alone() -> None:
    assert DeviceUse(2.0, 0.5, 10).step_s == pytest.approx(0.05)
    assert DeviceUse(2.0, 0.5, 0).step_s is None
    assert DeviceUse(2.0, 2.1, 10).idle_share == 0
