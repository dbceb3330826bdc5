from __future__ import annotations

import pytest

from specdec.drafting.length import step_times
from specdec.engine.timing import StepTimer


def test_a_pause_does_not_move_the_median_and_old_sizes_are_forgotten():
    timer = StepTimer()
    for i in range(40):
        timer.add(4, 100, 9.0 if i == 39 else 0.01)
        timer.add(4, 101, 0.01)
    (point,) = step_times(timer.metrics()).points
    assert (point.seconds, point.rows) == (0.01, 4)
    assert point.tokens == pytest.approx(100.5, abs=0.1)
    for n in range(60):
        timer.add(1, 8 * 2 ** (n // 4) + 2 ** (n // 4) * 2 * (n % 4), 0.01)
    assert len(step_times(timer.metrics()).points) == 48
    assert all(point.rows == 1 for point in step_times(timer.metrics()).points)
