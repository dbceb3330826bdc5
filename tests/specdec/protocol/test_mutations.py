"""A property test that could not fail would be a defect: with any rule switched off, some schedule breaks a promise."""

from __future__ import annotations

import pytest

from tests.specdec.protocol.branch_mutations import BRANCH_MUTATIONS
from tests.specdec.protocol.fault_mutations import FAULT_MUTATIONS
from tests.specdec.protocol.mutations import MUTATIONS
from tests.specdec.protocol.scripted import ScriptedDraft, ScriptedTarget
from tests.specdec.protocol.watch import Watch
from tests.specdec.protocol.world import run_schedule

MAX_SCHEDULES = 1500
"""A rule that no schedule among the first of them catches fails the test: most are caught within a few dozen."""
ALL = MUTATIONS | BRANCH_MUTATIONS | FAULT_MUTATIONS


@pytest.mark.parametrize("rule", ALL)
def test_schedules_catch_a_rule_that_is_off(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ALL[rule](monkeypatch)
    violations = (run_schedule(seed).violation for seed in range(MAX_SCHEDULES))
    caught = next((violation for violation in violations if violation is not None), None)
    assert caught is not None, f"none of {MAX_SCHEDULES} schedules breaks a promise with this rule off"
    assert not caught.startswith("raised"), "the mutation itself no longer fits the code"


@pytest.mark.parametrize("rule", ["right_branch", "branch_mark", "decided_outcome", "chosen_branch"])
def test_under_the_coupled_rule_no_wrong_branch_changes_a_token(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ALL[rule](monkeypatch)
    monkeypatch.setattr(ScriptedTarget, "_check_draft", lambda self, job: None)
    monkeypatch.setattr(ScriptedDraft, "_check_agreed", lambda self, job, base: None)
    monkeypatch.setattr(Watch, "_check_draft_row", lambda self, row: None)
    own = "a draft job is longer than the model reads"  # a branch in the place of a shorter one: the drafter's own harm
    assert {run_schedule(seed).violation for seed in range(0, 40, 2)} <= {None, own}
