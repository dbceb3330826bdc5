"""What is told of each step, and what a worker's report makes of it."""

from __future__ import annotations

import itertools

import pytest

from specdec.core.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.length import StepTime, step_times
from specdec.engine.observed import ObservedDrafter, ObservedTarget, StepRecord
from specdec.engine.timing import StepMetrics

SPEC = SequenceSpec(SamplingParams(), 0, 1, 8)
DECIDED, PREFILLING = Verification(Status.DECIDED, (5, 6), 1, 2), Verification(Status.PREFILLING)


class Scripted:
    """A backend that answers what a test wants."""

    max_model_len = 64

    def metrics(self):
        return {"kv_blocks_in_use": 3.0}

    def __init__(self):
        self.answers, self.calls = [], []

    def verify(self, jobs):
        return self.answers

    propose = verify

    def release(self, key):
        self.calls.append(("release", key))

    def rest(self):
        self.calls.append(("rest",))

    def rename(self, key, new_key):
        self.calls.append(("rename", key, new_key))


def clock():
    """Nanoseconds; every second reading is 0.25 s after the one before."""
    return itertools.accumulate(itertools.cycle((1_000_000_000, 250_000_000))).__next__


def jobs(*keys):
    return [VerifyJob(key, TokenLog((1, 2)), (7, 8), SPEC) for key in keys]


def points(report):
    return list(step_times(report.metrics()).points)


def test_steps_are_timed_by_rows_and_tokens_and_prompts_left_out():
    backend = Scripted()
    report = StepMetrics()
    observed = ObservedTarget(backend, [report], clock())
    backend.answers = [PREFILLING, DECIDED]
    assert observed.verify(jobs("a", "b")) == backend.answers
    backend.answers = [DECIDED, DECIDED]
    observed.verify(jobs("a", "b"))  # a has just been read
    assert points(report) == []
    observed.verify(jobs("a", "b"))
    assert points(report) == [StepTime(2, 6, 0.25, 1)]
    assert observed.metrics()["kv_blocks_in_use"] == 3
    observed.release("a")
    observed.verify(jobs("a", "b"))  # read anew
    assert points(report) == [StepTime(2, 6, 0.25, 1)]
    assert (observed.max_model_len, backend.calls) == (64, [("release", "a")])


def test_draft_steps_count_branches_from_their_first():
    backend = Scripted()
    report = StepMetrics()
    observed = ObservedDrafter(backend, [report], clock())
    backend.answers = [Proposal(Status.DECIDED, 5)]
    observed.propose([DraftJob("a", [1, 2], SPEC)])
    assert points(report) == []
    observed.rest()
    backend.answers *= 2
    observed.propose([DraftJob("a", [1, 2, 5], SPEC), DraftJob("a#0", [1, 2, 6], SPEC, fork_of="a")])
    assert points(report) == [StepTime(2, 2, 0.25, 1)]
    observed.rename("a#0", "a")
    assert backend.calls == [("rest",), ("rename", "a#0", "a")]


def test_draft_steps_in_which_anybody_waits_or_reads_are_left_out_and_so_is_the_first_after_it():
    backend, decided = Scripted(), Proposal(Status.DECIDED, 5)
    report = StepMetrics()
    observed = ObservedDrafter(backend, [report], clock())
    chain, branch = DraftJob("a", [1, 2], SPEC), DraftJob("a#0", [1, 2, 6], SPEC, fork_of="a")
    backend.answers = [decided]
    observed.propose([chain])
    for answers in (
        [decided, Proposal(Status.WAITING)],
        [decided, Proposal(Status.PREFILLING)],
        [Proposal(Status.WAITING), decided],
    ):
        backend.answers = answers
        observed.propose([chain, branch])
    backend.answers = [decided, decided]
    observed.propose([chain, branch])  # the chain waited
    assert points(report) == []
    observed.rest()
    observed.propose([chain, branch])
    observed.rest()
    backend.answers = [decided]
    observed.propose([branch])
    assert points(report) == [StepTime(2, 2, 0.25, 1), StepTime(1, 1, 0.25, 1)]


@pytest.mark.parametrize(("rests", "counted_s"), [(False, 3.5), (True, 1.0)])
def test_what_a_drafter_does_between_two_steps_is_part_of_the_second_unless_it_rested(rests, counted_s):
    backend = Scripted()
    report = StepMetrics()
    observed = ObservedDrafter(backend, [report], iter((0, 10**9, 35 * 10**8, 45 * 10**8)).__next__)
    backend.answers = [Proposal(Status.DECIDED, 5)]
    observed.propose([DraftJob("a", [1, 2], SPEC)])
    if rests:
        observed.rest()
    observed.propose([DraftJob("a", [1, 2, 5], SPEC)])
    assert points(report) == [StepTime(1, 1, counted_s, 1)]


def test_a_step_in_which_nothing_was_done_is_not_told_of():
    records: list[StepRecord] = []
    backend = Scripted()
    target, drafter = ObservedTarget(backend, [records.append]), ObservedDrafter(backend, [records.append])
    assert target.verify([]) == drafter.propose([]) == []
    backend.answers = [Verification(Status.WAITING)]
    target.verify(jobs("a"))
    backend.answers = [Proposal(Status.WAITING)]
    drafter.propose([DraftJob("a", [1, 2], SPEC)])
    assert records == []


def test_all_listeners_hear_of_a_step_with_its_jobs_and_results():
    first, second, backend = [], [], Scripted()
    target = ObservedTarget(backend, [first.append, second.append])
    backend.answers = [PREFILLING, DECIDED]
    asked = jobs("a", "b")
    target.verify(asked)
    assert first == second
    (record,) = first
    assert (record.jobs, record.results) == (asked, backend.answers)
    assert (record.num_rows, record.num_tokens, record.num_draft_tokens) == (2, 3, 2)
    assert not record.is_decode
    assert not record.goes_on


def test_a_drafters_record_counts_branches_and_reads_prompts_by_its_chains():
    records, backend = [], Scripted()
    drafter = ObservedDrafter(backend, [records.append])
    chain, branch = DraftJob("a", [1, 2], SPEC), DraftJob("a#0", [1, 2, 3], SPEC, fork_of="a")
    decided, prefilling, waiting = Proposal(Status.DECIDED, 5), Proposal(Status.PREFILLING), Proposal(Status.WAITING)

    def step(*answers: tuple[DraftJob, Proposal]) -> tuple[int, int, bool]:
        backend.answers = [answer for _, answer in answers]
        drafter.propose([job for job, _ in answers])
        return records[-1].num_rows, records[-1].num_tokens, records[-1].is_decode

    assert step((chain, prefilling)) == (1, 0, False)
    assert step((chain, decided)) == (1, 1, False)
    assert step((chain, decided), (branch, waiting)) == (1, 1, False)
    assert step((chain, decided), (branch, decided)) == (2, 2, True)
    assert step((branch, decided)) == (1, 1, True)
    drafter.release("a")
    assert step((chain, decided), (branch, decided)) == (2, 2, False)
