"""A property test that could not fail would be a defect: with any rule switched off, a schedule breaks."""

from __future__ import annotations

import pytest

from .mutations import MUTATIONS
from .world import run_schedule

SCHEDULES = 600


@pytest.mark.parametrize("rule", MUTATIONS)
def test_schedules_catch_a_rule_that_is_off(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[rule](monkeypatch)
    assert any(run_schedule(seed).violation is not None for seed in range(SCHEDULES))
