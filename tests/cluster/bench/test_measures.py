"""Figures against the same ones worked out by hand."""

from __future__ import annotations

import pytest

from cluster.bench.compare import ALONE, Comparison, Mode, Work
from cluster.bench.measures import (
    Arrival,
    DeviceUse,
    Run,
    Stream,
    acceptance_rate,
    covered_s,
    device_use,
    hit_rate,
    mean,
    mean_acceptance_length,
    percentiles_s,
    token_gaps_s,
)
from cluster.bench.summary import summarize
from specdec.engine.observed import Role, StepRecord

ARRIVALS = (Arrival(0.5, 2), Arrival(0.8, 1), Arrival(1.4, 3))
STREAM = Stream("abcdef", ARRIVALS, num_drafts=2, num_draft_tokens=8, num_accepted_tokens=3)
"""Six tokens in three rounds: 1 + 1 accepted, plain, 1 + 2 accepted."""


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    assert token_gaps_s(ARRIVALS) == pytest.approx([0.0, 0.3, 0.6, 0.0, 0.0])
    assert mean(token_gaps_s(ARRIVALS)) == pytest.approx((1.4 - 0.5) / 5)
    assert token_gaps_s([Arrival(1.0, 1)]) == []
    assert token_gaps_s([Arrival(1.0, 1), Arrival(2.0, 0), Arrival(3.0, 1)]) == pytest.approx([2.0])


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
    assert Stream("a", (Arrival(0.5, 1),)).decode_tokens_per_s == 0


def test_a_run() -> None:
    run = Run((STREAM, Stream("xy", (Arrival(0.25, 1), Arrival(0.5, 1)))), duration_s=1.6)
    assert run.num_tokens == 8
    assert run.tokens_per_s == pytest.approx(5.0)
    assert run.decode_tokens_per_s == pytest.approx(4 / 0.9 + 4)
    assert run.texts == ("abcdef", "xy")


def test_acceptance_is_pooled_over_streams() -> None:
    other = Stream("xyz", (Arrival(1, 3),), num_drafts=1, num_draft_tokens=2, num_accepted_tokens=2)
    streams = [STREAM, other]
    assert acceptance_rate(streams) == pytest.approx(5 / 10)
    assert mean_acceptance_length(streams) == pytest.approx(1 + 5 / 3)
    assert hit_rate([STREAM]) == 1.0  # two rounds after the first, both with a draft
    plain = Stream("xyz", (Arrival(1, 3),))
    assert hit_rate([STREAM, plain]) == pytest.approx(2 / 4)
    assert (acceptance_rate([plain]), mean_acceptance_length([plain]), hit_rate([plain])) == (None, None, 0.0)


def step(role: Role, start_s: float, end_s: float, *, is_decode: bool = True) -> StepRecord:
    start_ns, end_ns = round(1e9 * start_s), round(1e9 * end_s)
    return StepRecord(role, start_ns, end_ns, start_ns, 1, 1, 0, is_decode=is_decode, goes_on=False)


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
    assert covered_s(steps) == pytest.approx(0.8)
    assert covered_s([*steps, step("drafter", 0.1, 0.2)]) == pytest.approx(0.8)


def test_a_device_known_by_its_counters_alone() -> None:
    assert DeviceUse(2.0, 0.5, 10).step_s == pytest.approx(0.05)
    assert DeviceUse(2.0, 0.5, 0).step_s is None
    assert DeviceUse(2.0, 2.1, 10).idle_share == 0


def test_a_service_whose_devices_tell_their_counters() -> None:
    """Ten plain rounds of 30 ms in 0.4 s; then five rounds of 36 ms with drafts of 2 ms steps in 0.3 s."""
    plain = Stream("a" * 10, tuple(Arrival(0.04 * i, 1) for i in range(1, 11)))
    drafted = Stream("a" * 10, tuple(Arrival(0.06 * i, 2) for i in range(1, 6)), 4, 16, 5)
    alone = Run((plain,), 0.4, devices={"target": DeviceUse(0.4, 0.3, 10)})
    devices = {"target": DeviceUse(0.3, 0.18, 5), "draft": DeviceUse(0.3, 0.04, 20)}
    run = Run((drafted,), 0.3, devices=devices)
    modes = (Mode(ALONE, 0), Mode("in turn", 4, "in_turn"), Mode("overlap", 4, "overlap"))
    rows = summarize(Comparison(Work("code", 1, 10, 0.0), modes, ((alone,), (run,), (run,))))
    assert [row.outside_s_per_round for row in rows] == pytest.approx([0.01, 0.08 / 5, 0.12 / 5])
