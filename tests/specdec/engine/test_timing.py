from __future__ import annotations

import itertools

import pytest

from specdec.control.steptimes import StepTime, step_times
from specdec.engine.forwarding import ForwardingDrafter
from specdec.engine.timing import StepTimer, TimedDrafter, TimedTarget
from specdec.protocol.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.protocol.marks import TokenLog
from specdec.sampling.params import SamplingParams, SequenceSpec

SPEC = SequenceSpec(SamplingParams(), 0, 1, 8)
DECIDED, PREFILLING = Verification(Status.DECIDED, (5, 6), 1, 2), Verification(Status.PREFILLING)


class Told:
    """A backend that answers what a test wants."""

    max_model_len = 64

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
    """Every second reading is 0.25 s after the one before."""
    return itertools.accumulate(itertools.cycle((1.0, 0.25))).__next__


def jobs(*keys):
    return [VerifyJob(key, TokenLog((1, 2)), (7, 8), SPEC) for key in keys]


def points(timed):
    return list(step_times(timed.gauges()).points)


def test_steps_are_timed_by_rows_and_tokens_and_prompts_left_out():
    backend = Told()
    timed = TimedTarget(backend, lambda: {"kv_blocks_in_use": 3.0}, clock())
    backend.answers = [PREFILLING, DECIDED]
    assert timed.verify(jobs("a", "b")) == backend.answers
    backend.answers = [DECIDED, DECIDED]
    timed.verify(jobs("a", "b"))  # a has just been read
    assert points(timed) == []
    timed.verify(jobs("a", "b"))
    assert points(timed) == [StepTime(2, 6, 0.25, 1)]
    assert timed.gauges()["kv_blocks_in_use"] == 3
    timed.release("a")
    timed.verify(jobs("a", "b"))  # read anew
    assert points(timed) == [StepTime(2, 6, 0.25, 1)]
    assert (timed.max_model_len, backend.calls) == (64, [("release", "a")])


def test_draft_steps_count_branches_from_their_first():
    backend = Told()
    timed = TimedDrafter(backend, clock=clock())
    backend.answers = [Proposal(Status.DECIDED, 5)]
    timed.propose([DraftJob("a", [1, 2], SPEC)])
    assert points(timed) == []
    ForwardingDrafter(timed).rest()
    backend.answers *= 2
    timed.propose([DraftJob("a", [1, 2, 5], SPEC), DraftJob("a#0", [1, 2, 6], SPEC, fork_of="a")])
    assert points(timed) == [StepTime(2, 2, 0.25, 1)]
    timed.rename("a#0", "a")
    assert backend.calls == [("rest",), ("rename", "a#0", "a")]


def test_draft_steps_in_which_anybody_waits_or_reads_are_left_out_and_so_is_the_first_after_it():
    backend, decided = Told(), Proposal(Status.DECIDED, 5)
    timed = TimedDrafter(backend, clock=clock())
    chain, branch = DraftJob("a", [1, 2], SPEC), DraftJob("a#0", [1, 2, 6], SPEC, fork_of="a")
    backend.answers = [decided]
    timed.propose([chain])
    for answers in (
        [decided, Proposal(Status.WAITING)],
        [decided, Proposal(Status.PREFILLING)],
        [Proposal(Status.WAITING), decided],
    ):
        backend.answers = answers
        timed.propose([chain, branch])
    backend.answers = [decided, decided]
    timed.propose([chain, branch])  # the chain waited
    assert points(timed) == []
    timed.rest()
    timed.propose([chain, branch])
    timed.rest()
    backend.answers = [decided]
    timed.propose([branch])
    assert points(timed) == [StepTime(2, 2, 0.25, 1), StepTime(1, 1, 0.25, 1)]


@pytest.mark.parametrize(("rests", "counted_s"), [(False, 3.5), (True, 1.0)])
def test_what_a_drafter_does_between_two_steps_is_part_of_the_second_unless_it_rested(rests, counted_s):
    backend = Told()
    timed = TimedDrafter(backend, clock=iter((0.0, 1.0, 3.5, 4.5)).__next__)
    backend.answers = [Proposal(Status.DECIDED, 5)]
    timed.propose([DraftJob("a", [1, 2], SPEC)])
    if rests:
        timed.rest()
    timed.propose([DraftJob("a", [1, 2, 5], SPEC)])
    assert points(timed) == [StepTime(1, 1, counted_s, 1)]


def test_a_pause_does_not_move_the_median_and_old_sizes_are_forgotten():
    timer = StepTimer()
    for i in range(40):
        timer.add(4, 100, 9.0 if i == 39 else 0.01)
        timer.add(4, 101, 0.01)
    (point,) = step_times(timer.report()).points
    assert (point.seconds, point.rows) == (0.01, 4)
    assert point.tokens == pytest.approx(100.5, abs=0.1)
    for n in range(60):
        timer.add(1, 8 * 2 ** (n // 4) + 2 ** (n // 4) * 2 * (n % 4), 0.01)
    assert len(step_times(timer.report()).points) == 48
    assert all(point.rows == 1 for point in step_times(timer.report()).points)
