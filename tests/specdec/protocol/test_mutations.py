"""A property test that could not fail would be a defect: with any rule switched off, some schedule breaks a promise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest

from tests.specdec.protocol.branch_mutations import BRANCH_MUTATIONS
from tests.specdec.protocol.mutations import MUTATIONS
from tests.specdec.protocol.scripted import ScriptedDraft, ScriptedTarget
from tests.specdec.protocol.watch import Watch
from tests.specdec.protocol.world import run_schedule

SCHEDULES = 1500
FIRST_SEEDS = {
    "branch_agreed": 11,
    "cumulative": 19,
    "drafter_n": 30,
    "gap": 290,
    "heard_again": 10,
    "ingress_mark": 101,
    "live_inc": 16,
    "mark_shorter": 527,
    "preempted": 55,
    "repeat": 13,
    "right_branch": 14,
}
"""Where the search begins: the first schedule that catches a rule which few of them do. Stale ones cost time only."""
ALL = MUTATIONS | BRANCH_MUTATIONS


def seeds(rule: str) -> Iterator[int]:
    """All schedules, from the one on that is known to catch the rule."""
    first = FIRST_SEEDS.get(rule, 0)
    return chain(range(first, SCHEDULES), range(first))


@pytest.mark.parametrize("rule", ALL)
def test_schedules_catch_a_rule_that_is_off(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ALL[rule](monkeypatch)
    violations = (run_schedule(seed).violation for seed in seeds(rule))
    caught = next((violation for violation in violations if violation is not None), None)
    assert caught is not None
    assert not caught.startswith("raised"), "the mutation itself no longer fits the code"


@pytest.mark.parametrize("rule", ["right_branch", "branch_mark", "decided_outcome", "chosen_branch"])
def test_under_the_coupled_rule_no_wrong_branch_changes_a_token(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ALL[rule](monkeypatch)
    monkeypatch.setattr(ScriptedTarget, "_check_draft", lambda self, job: None)
    monkeypatch.setattr(ScriptedDraft, "_check_agreed", lambda self, job, base: None)
    monkeypatch.setattr(Watch, "_check_draft_row", lambda self, row: None)
    assert [violation for seed in range(0, 40, 2) if (violation := run_schedule(seed).violation)] == []
