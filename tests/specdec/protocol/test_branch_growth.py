"""What a drafter asks its backend for while branches grow."""

from __future__ import annotations

from specdec.core.messages import Plan, PlanUpdate
from tests.specdec.protocol.scripted import PROMPT
from tests.specdec.protocol.test_branches import (
    EPOCH,
    commit,
    machine_with,
    sequence_of,
    settle,
    settle_after_hit,
)


def branch_jobs(machine):
    return [job for job in machine._backend.batches[-1] if job.fork_of is not None]


def test_a_branch_that_grows_is_asked_for_by_what_is_committed_and_planned_now():
    machine = machine_with(num_draft_tokens=8, num_branches=8)
    settle(machine)
    settle_after_hit(machine)
    settle(machine, 2)
    sequence, few = sequence_of(machine), {job.num_guesses for job in branch_jobs(machine)}
    chain = tuple(sequence.path.tokens)
    commit(machine, tuple(sequence.log.tokens[len(PROMPT) :]), chain[:1])
    kept = {branch.key for branch in sequence.branches.values()}
    settle(machine, 1)
    assert kept & {job.key for job in branch_jobs(machine)}
    assert {job.num_committed for job in branch_jobs(machine)} == {len(sequence.log)}
    machine.receive(PlanUpdate("s", EPOCH, Plan(8, 32, 0.5)), 0.0)
    settle(machine, 1)
    assert kept & {job.key for job in branch_jobs(machine)}
    assert {job.num_guesses for job in branch_jobs(machine)} == {sequence.num_guesses}
    assert sequence.num_guesses > max(few)
