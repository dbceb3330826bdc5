"""What a drafter asks its backend for while branches grow, and when it sends them among many sequences."""

from __future__ import annotations

import pytest

from specdec.protocol.messages import Plan, PlanUpdate
from tests.specdec.protocol.scripted import PROMPT
from tests.specdec.protocol.test_branches import (
    INC,
    commit,
    machine_with,
    open_others,
    row_of,
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
    row, few = row_of(machine), {job.num_guesses for job in branch_jobs(machine)}
    chain = tuple(row.path.tokens)
    commit(machine, tuple(row.log.tokens[len(PROMPT) :]), chain[:1])
    kept = {branch.key for branch in row.branches.values()}
    settle(machine, 1)
    assert kept & {job.key for job in branch_jobs(machine)}
    assert {job.num_committed for job in branch_jobs(machine)} == {len(row.log)}
    machine.receive(PlanUpdate("s", INC, Plan(8, 32, 0, 0.5)), 0.0)
    settle(machine, 1)
    assert kept & {job.key for job in branch_jobs(machine)}
    assert {job.num_guesses for job in branch_jobs(machine)} == {row.num_guesses}
    assert row.num_guesses > max(few)


@pytest.mark.parametrize(("others", "first"), [(0, 2), (40, 2), (48, 3), (70, 4), (300, 4)])
def test_among_many_sequences_the_first_part_is_longer_where_there_is_no_deadline(others, first):
    machine = machine_with(num_draft_tokens=4)
    open_others(machine, others)
    settle(machine)
    settle_after_hit(machine)
    assert [bool(settle(machine, 1)) for _ in range(4)].index(True) == first - 1


@pytest.mark.parametrize(
    ("others", "fit", "draft_wait_s", "first"),
    [(0, 5, 0.0, 2), (20, 5, 0.0, 4), (20, 2, 0.0, 1), (48, 0, 0.0, 2), (20, 5, 0.1, 2)],
)
def test_among_many_sequences_a_first_chain_awaits_the_deadline(others, fit, draft_wait_s, first):
    """Where the plan has one, and the target does not wait for that very chain."""
    machine = machine_with(num_draft_tokens=4, fit=fit, draft_wait_s=draft_wait_s)
    open_others(machine, others)
    settle(machine)
    commit(machine, (), (9,))  # a miss
    of_this = [any(offer.seq == "s" for offer in settle(machine, 1)) for _ in range(6)]
    assert of_this.index(True) == first - 1


@pytest.mark.parametrize("num_steps", [2, 3])
def test_a_deadline_that_is_never_reached_holds_back_nothing_for_ever(num_steps):
    """A target without drafts goes on with plain steps, which may be shorter than those of the deadline.

    With one draft step to each, what is drafted is decided by then, and there is nothing to offer.
    """
    machine = machine_with(num_draft_tokens=4, fit=5)
    open_others(machine, 20)
    rounds = 0
    while not any(offer.seq == "s" for offer in settle(machine, num_steps)):
        row = row_of(machine)
        commit(machine, tuple(row.log.tokens[len(PROMPT) :]), row.path.tokens[:1])
        rounds += 1
        assert rounds < 5


def test_what_a_deadline_held_back_goes_once_before_the_next():
    machine = machine_with(num_draft_tokens=4, fit=5)
    open_others(machine, 20)
    assert not any(offer.seq == "s" for offer in settle(machine, 3))
    commit(machine, (), row_of(machine).path.tokens[:1])
    assert [any(offer.seq == "s" for offer in settle(machine, 1)) for _ in range(4)] == [True, False, False, True]
