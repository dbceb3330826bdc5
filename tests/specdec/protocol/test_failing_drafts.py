"""No draft ends a sequence (rule 9), whatever it holds and whatever a step makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.core.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.core.drafts import Draft
from specdec.core.log import TokenLog
from specdec.core.messages import Offer, Plan
from specdec.core.params import SequenceSpec
from specdec.drafting.ngram import NgramOptions, Reading
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.target import TargetMachine
from tests.specdec.protocol.scripted import log_of
from tests.specdec.protocol.test_faults import FaultyDraft, ends, keys
from tests.specdec.protocol.test_target import EPOCH, TIMES, TRUE, Oracle, open_message, verdicts

TOO_LARGE = 2**31


class FailsWithDrafts(Oracle):
    """Raises in each step that verifies a draft of some sequences."""

    def __init__(self, faulty: str) -> None:
        super().__init__()
        self.faulty = faulty

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        results: list[Verification] = super().verify(jobs)
        if any(job.draft and job.key in self.faulty for job in jobs):
            raise RuntimeError("a kernel that verifies drafts")
        return results


def offer_all(machine: TargetMachine, num_tokens: int = 1) -> None:
    """Each sequence is offered its true next tokens."""
    for sequence in machine._sequences:
        done = len(sequence.log) - 2
        prefix_hash = log_of(TRUE[:done]).prefix_hash()
        offer = Offer(sequence.seq, EPOCH, prefix_hash, TRUE[done : done + num_tokens])
        machine.receive(offer, 0.0)
        sequence.acked = len(sequence.log)


def run(machine: TargetMachine, names: str, num_steps: int = 200) -> None:
    for name in names:
        machine.receive(open_message(seq=name, plan=Plan(1)), 0.0)
    for _ in range(num_steps):
        offer_all(machine)
        machine.step(0.0)


@pytest.mark.parametrize("names", ["a", "ab", "abcdefgh"])
def test_steps_that_fail_with_any_draft_end_no_sequence(names: str) -> None:
    machine = TargetMachine("T", FailsWithDrafts(names), TIMES)
    run(machine, names)
    assert {seq: finish for seq, (finish, _) in ends(machine).items()} == dict.fromkeys(names, "length")
    counters = machine.counters
    assert counters.num_failed_steps == len(names) + 1
    assert (counters.num_drafts_off, counters.num_errors, counters.num_drafts) == (len(names), 0, 0)


def test_the_draft_that_makes_steps_fail_is_found_and_the_others_keep_theirs() -> None:
    machine = TargetMachine("T", FailsWithDrafts("c"), TIMES)
    run(machine, "abcd")
    assert {seq: finish for seq, (finish, _) in ends(machine).items()} == dict.fromkeys("abcd", "length")
    assert (machine.counters.num_failed_steps, machine.counters.num_drafts_off) == (2, 1)
    assert machine.counters.num_drafts >= 3 * 3


def test_a_step_that_failed_with_drafts_is_tried_without_them_by_the_same_sequences() -> None:
    machine = TargetMachine("T", FailsWithDrafts("b"), TIMES)
    for name in "abc":
        machine.receive(open_message(seq=name, plan=Plan(1)), 0.0)
    machine.step(0.0)
    offer_all(machine)
    machine.step(0.0)
    machine.step(0.0)
    assert keys(machine) == [("a", "b", "c")] * 3
    assert [draft for _, draft in machine._backend.batches[1]] == [TRUE[1:2]] * 3
    assert [draft for _, draft in machine._backend.batches[2]] == [()] * 3


@pytest.mark.parametrize("token", [-1, TOO_LARGE, 2**64])
@pytest.mark.parametrize("place", ["token", "further", "guesses"])
def test_a_drafter_outlives_ids_that_no_token_can_have(token: int, place: str) -> None:
    class Wild(FaultyDraft):
        def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
            good = Proposal(Status.DECIDED, 5, guesses=(6, 7))
            bad = {
                "token": good._replace(token=token),
                "further": good._replace(further=(good._replace(token=token),)),
                "guesses": good._replace(guesses=(6, token)),
            }[place]
            return [bad if (job.fork_of or job.key) == "b" else good for job in jobs]

    machine = DrafterMachine("D", Wild(), TIMES)
    for name in "abc":
        machine.receive(open_message(seq=name, plan=Plan(3, 2)), 0.0)
    for _ in range(10):
        machine.step(0.0)
    assert {message.seq for message in machine.take_outbox()["R"]} == {"a", "c"}
    assert machine.metrics()["num_skipped_sequences"] == 1


@pytest.mark.parametrize("token", [-1, TOO_LARGE])
def test_a_target_outlives_ids_that_no_token_can_have(token: int) -> None:
    class Wild(Oracle):
        def _decide(self, job: VerifyJob) -> Verification:
            return Verification(Status.DECIDED, (token,)) if job.key == "b" else super()._decide(job)

    machine = TargetMachine("T", Wild(), TIMES)
    run(machine, "abc", num_steps=20)
    assert {seq: finish for seq, (finish, _) in ends(machine).items()} == {"a": "length", "b": "error", "c": "length"}


class Outside:
    """A drafter from tokens that is not in this tree, and raises in one of its methods for one seed."""

    is_long = True

    def __init__(self, fails_in: str) -> None:
        self.fails_in = fails_in

    def _fail(self, where: str) -> None:
        if where == self.fails_in:
            raise IndexError("in a plug-in")

    def draft(self, log: TokenLog, room: int, reading: Reading) -> Draft:
        self._fail("draft")
        # As long as it likes: more than the request has room for.
        return Draft(TRUE[len(log) - 2 :], source="outside")

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        self._fail("judge")


@pytest.mark.parametrize("method", ["new", "draft", "judge"])
def test_a_drafter_from_tokens_that_raises_is_asked_no_more(method: str) -> None:
    def new(spec: SequenceSpec, most: int) -> Outside:
        if spec.priority and method == "new":
            raise IndexError("in a plug-in")
        return Outside(method if spec.priority else "")

    machine = TargetMachine("T", Oracle(), TIMES, ngram=NgramOptions(3, new=new))
    machine.receive(open_message(seq="a"), 0.0)
    machine.receive(open_message(seq="b", priority=1), 0.0)
    for _ in range(20):
        machine.step(0.0)
        for sequence in machine._sequences:
            sequence.acked = len(sequence.log)
    ended = {message.seq: message for message in verdicts(machine) if message.finish is not None}
    assert {seq: message.finish for seq, message in ended.items()} == {"a": "length", "b": "length"}
    assert [list(sequence.log.tokens[2:]) for sequence in machine._sequences] == [list(TRUE[:12])] * 2
    assert (machine.counters.num_token_drafters_off, machine.counters.num_failed_steps) == (1, 0)
