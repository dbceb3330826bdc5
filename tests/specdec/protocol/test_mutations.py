"""A property test that could not fail would be a defect: with any rule switched off, some schedule breaks a promise."""

from __future__ import annotations

import pytest

from tests.specdec.protocol.mutations import MUTATIONS
from tests.specdec.protocol.world import run_schedule

SCHEDULES = 1500


@pytest.mark.parametrize("rule", MUTATIONS)
def test_schedules_catch_a_rule_that_is_off(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[rule](monkeypatch)
    violations = (run_schedule(seed).violation for seed in range(SCHEDULES))
    caught = next((violation for violation in violations if violation is not None), None)
    assert caught is not None
    assert not caught.startswith("raised"), "the mutation itself no longer fits the code"
