"""A property test that could not fail would be a defect: with any rule switched off, some schedule breaks a promise."""

from __future__ import annotations

import pytest

from tests.sizes import sized
from tests.specdec.protocol.branch_mutations import BRANCH_MUTATIONS
from tests.specdec.protocol.fault_mutations import FAULT_MUTATIONS
from tests.specdec.protocol.mutations import MUTATIONS
from tests.specdec.protocol.scripted import ScriptedDraft, ScriptedTarget
from tests.specdec.protocol.watch import Watch
from tests.specdec.protocol.world import run_schedule

MAX_SCHEDULES = 1500
"""A rule that no schedule among the first of them catches fails the test: most are caught within a few dozen."""
FOUND_BY = {
    "agreed": 3,
    "append_once": 0,
    "bounded": 0,
    "bounded_reopening": 9,
    "branch_agreed": 4,
    "branch_prefix_hash": 0,
    "chosen_branch": 1,
    "commits_to_all": 422,
    "credit": 0,
    "cumulative": 33,
    "decided_outcome": 6,
    "drafter_n": 50,
    "end_prefix_hash": 0,
    "error_is_a_finish": 5,
    "failures_of_its_own": 0,
    "finish_equal": 5,
    "finish_on_open": 0,
    "freed_siblings": 0,
    "freed_when_opened_anew": 4,
    "gap": 723,
    "ids_of_drafts": 12,
    "idempotent_open": 1,
    "epoch": 6,
    "ingress_attempt": 27,
    "ingress_prefix_hash": 201,
    "leases": 0,
    "live_epoch": 297,
    "lost_with_its_offers": 6,
    "merged_as_a_trie": 6,
    "named_by_each_router": 38,
    "named_offers": 6,
    "prefix_hash": 25,
    "prefix_hash_shorter": 101,
    "no_draft_ends_a_sequence": 4,
    "no_rewind": 0,
    "notes_by_position": 0,
    "opened_apart": 11,
    "order_of_merging": 222,
    "own_incarnations": 6,
    "own_mark": 7,
    "own_room": 78,
    "preempted": 23,
    "release": 0,
    "renamed": 4,
    "repeat": 5,
    "right_branch": 0,
    "routers_that_drain": 33,
    "same_model": 42,
    "same_model_at_the_router": 2,
    "steps_apart": 53,
    "tombstones": 0,
    "workers_that_drain": 0,
}
"""A schedule that breaks a promise with a rule off. Where it no longer does, all are tried; ``--whole`` prints it."""
ALL = MUTATIONS | BRANCH_MUTATIONS | FAULT_MUTATIONS


@pytest.mark.parametrize("rule", ALL)
def test_schedules_catch_a_rule_that_is_off(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ALL[rule](monkeypatch)
    remembered = sized([FOUND_BY[rule]] if rule in FOUND_BY else [], [])
    found = ((seed, run_schedule(seed).violation) for seed in (*remembered, *range(MAX_SCHEDULES)))
    seed, caught = next(((seed, violation) for seed, violation in found if violation is not None), (None, None))
    print(f'    "{rule}": {seed},')
    assert caught is not None, f"none of {MAX_SCHEDULES} schedules breaks a promise with this rule off"
    assert not caught.startswith("raised"), "the mutation itself no longer fits the code"


@pytest.mark.parametrize("rule", ["right_branch", "branch_prefix_hash", "decided_outcome", "chosen_branch"])
def test_no_wrong_branch_changes_a_token(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ALL[rule](monkeypatch)
    monkeypatch.setattr(ScriptedTarget, "_check_draft", lambda self, job: None)
    monkeypatch.setattr(ScriptedDraft, "_check_agreed", lambda self, job, base: None)
    monkeypatch.setattr(Watch, "_check_draft_sequence", lambda self, row: None)
    own = "a draft job is longer than the model reads"  # a branch in the place of a shorter one: the drafter's own harm
    assert {run_schedule(seed).violation for seed in range(0, sized(10, 40), 2)} <= {None, own}
