from __future__ import annotations

import random

import pytest

from specdec.drafting.length.modes import StepTime, StepTimes, interpolate, step_times
from specdec.engine.timing import StepTimer


def test_what_a_timer_reports_is_read_back_and_nonsense_is_left_out():
    timer = StepTimer()
    for seconds in (0.03, 0.031, 0.5):
        timer.add(2, 10, seconds)
    report = timer.metrics()
    assert step_times(report).points == (StepTime(2.0, 10.0, 0.031, 3.0),)
    assert not step_times({**report, "step/0/seconds": float("nan")})
    assert not step_times({**report, "step/0/rows": 0.0})
    assert not StepTimes()


def test_noise_on_a_level_curve_does_not_become_a_slope():
    rng = random.Random(0)
    points = tuple(StepTime(8, 8 * k, 0.03 * rng.lognormvariate(0, 0.03), 10) for k in range(1, 12))
    times = StepTimes(points)
    seconds = [times.at(8, tokens) for tokens in range(8, 90, 4)]
    assert seconds == sorted(seconds)
    assert seconds[-1] / seconds[0] < 1.06


def test_the_curve_follows_growth_and_goes_on_as_over_the_last_octave():
    times = StepTimes(tuple(StepTime(4, n, 0.01 * max(1, n / 16), 9) for n in (4, 8, 16, 24, 32)))
    assert [round(times.at(4, n), 4) for n in (2, 6, 16, 20, 32, 48)] == [0.01, 0.01, 0.01, 0.0125, 0.02, 0.03]
    assert StepTimes((StepTime(4, 8, 0.01, 9),)).at(4, 800) == pytest.approx(0.01)
    assert interpolate([1.0, 2.0], [5.0, 7.0], 1.5) == 6.0


def test_steps_of_as_many_rows_count_most():
    times = StepTimes((StepTime(1, 16, 0.01, 9), StepTime(16, 16, 0.02, 9)))
    assert times.at(1, 16) < 0.0105
    assert times.at(16, 16) > 0.0195
