"""Errors of one sequence, steps that fail as a whole, and what becomes of those that shared them."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from specdec.core.backends import Proposal, Status, Verification
from specdec.core.drafts import Draft
from specdec.core.errors import DeviceLostError
from specdec.core.messages import Ack, Plan
from specdec.protocol import worker
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.target import TargetMachine
from specdec.protocol.worker import MOST_ALONE, apart
from tests.specdec.protocol.test_target import TIMES, TRUE, Oracle, open_message


class Faulty(Oracle):
    """Raises in every step that ``poison`` is in; ``failing`` fails by itself."""

    own = None

    def __init__(self, *, poison=None, failing=None, status=Status.FAILED, error=None, **options):
        super().__init__(**options)
        self.poison, self.failing, self.status = poison, failing, status
        self.error = error or MemoryError("no room")

    def verify(self, jobs):
        results = super().verify(jobs)
        if self.poison in [job.key for job in jobs]:
            raise self.error
        failed = Verification(self.status, reason="its hook raised", own=self.own)
        return [failed if job.key == self.failing else result for job, result in zip(jobs, results, strict=True)]


def machine_of(backend, names):
    machine = TargetMachine("T", backend, TIMES)
    for name in names:
        machine.receive(open_message(seq=name, plan=Plan(0)), 0.0)
    return machine


def keys(machine):
    return [tuple(key for key, _ in batch) for batch in machine._backend.batches]


def ends(machine):
    sent = machine.take_outbox().get("R", [])
    return {message.seq: (message.finish, message.reason) for message in sent if message.finish is not None}


def test_a_suspect_of_the_backend_is_tried_alone_and_ends_the_second_time():
    machine = machine_of(Faulty(failing="b", status=Status.SUSPECT), "abc")
    for _ in range(3):
        machine.step(0.0)
    assert keys(machine) == [("a", "b", "c"), ("b",), ("a", "c")]
    assert ends(machine) == {"b": ("error", "its hook raised")}
    report = machine.metrics()
    assert (report["num_failed_steps"], report["num_errors"], report["num_suspects"]) == (0, 1, 1)


def test_a_suspect_with_a_draft_of_its_backend_is_tried_without_it_first():
    """What the backend itself drafted may be at fault: it does not count as a failure of the sequence alone."""
    backend = Faulty(failing="b", status=Status.SUSPECT)
    backend.own = Draft((7,), source="chain")
    machine = machine_of(backend, "abc")
    machine.step(0.0)
    backend.own = None
    for _ in range(3):
        machine.step(0.0)
    assert keys(machine) == [("a", "b", "c"), ("b",), ("a", "c"), ("b",)]
    assert ends(machine) == {"b": ("error", "its hook raised")}
    assert machine.metrics()["num_suspects"] == 2


def test_a_sequence_that_failed_alone_once_goes_on():
    backend = Faulty(poison="a")
    machine = machine_of(backend, "a")
    machine.step(0.0)
    backend.poison = None
    for _ in range(3):
        machine.step(0.0)
    assert ends(machine) == {}
    assert len(machine.take_outbox().get("R", [])) == 0
    assert len(next(iter(machine._sequences)).log) == 5


def test_a_failure_of_long_ago_does_not_count(monkeypatch):
    monkeypatch.setattr(worker, "FORGIVEN_TOKENS", 2)
    backend = Faulty(poison="a")
    machine = machine_of(backend, "a")
    machine.step(0.0)
    backend.poison = None
    for _ in range(2):
        machine.step(0.0)
    backend.poison = "a"
    machine.step(0.0)
    assert ends(machine) == {}
    machine.step(0.0)
    assert ends(machine)["a"] == ("error", "MemoryError: no room")


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (16, [1] * 16), (17, [9, 8]), (64, [32, 32])])
def test_suspects_are_tried_alone_or_in_halves(count, sizes):
    groups = apart(list(range(count)))
    assert [len(group) for group in groups] == sizes
    assert [member for group in groups for member in group] == list(range(count))


def test_one_of_many_is_found_by_halves():
    names = [f"{i:02d}" for i in range(2 * MOST_ALONE + 2)]
    machine = machine_of(Faulty(poison="20"), names)
    for _ in range(80):
        machine.step(0.0)
    assert machine.metrics()["num_failed_steps"] == 1 + 1 + 1 + 2  # all, a half of 17, a half of 9, alone, alone
    assert [sequence.seq for sequence in machine._sequences if sequence.finish == "error"] == ["20"]
    assert all(sequence.suspects == "" for sequence in machine._sequences)


def test_a_group_that_another_worker_failed_with_has_a_step_of_its_own_once_its_router_knows():
    machine = machine_of(Oracle(), "ab")
    for name in "cd":
        machine.receive(structs.replace(open_message(seq=name, plan=Plan(0)), suspects="R/1"), 0.0)
    machine.step(0.0)
    announced = [message for message in machine.take_outbox()["R"] if message.seq in "cd"]
    assert [(message.seq, message.tokens, message.finish) for message in announced] == [
        ("c", (), None),
        ("d", (), None),
    ]
    machine.step(0.0)
    assert keys(machine) == [("a", "b")] * 2, "the router does not know yet"
    for message in announced:
        machine.receive(Ack(message.seq, message.epoch, message.prefix_hash.length), 0.0)
    for _ in range(2):
        machine.step(0.0)
    assert keys(machine)[2:] == [("c", "d"), ("a", "b", "c", "d")]


def test_suspects_alone_do_nothing_until_their_router_knows():
    machine = machine_of(Oracle(), "")
    opening = open_message(seq="c", plan=Plan(0))
    machine.receive(structs.replace(opening, suspects="R/1"), 0.0)
    for i in range(10):
        assert not machine.step(0.01 * i * TIMES.retry_interval_s), "or it would be driven without a pause"
    assert keys(machine) == []
    assert machine.counters.num_steps == 0
    assert len(machine.take_outbox()["R"]) == 1


class Reads(Oracle):
    """Reads one token of a prompt in a step."""

    def __init__(self):
        super().__init__()
        self.num_read = Counter()

    def _decide(self, job):
        self.num_read[job.key] += 1
        is_read = self.num_read[job.key] >= len(job.log)
        return super()._decide(job) if is_read else Verification(Status.PREFILLING)


@pytest.mark.parametrize("names", ["c", "cde"])
def test_while_suspects_are_read_again_the_others_have_every_second_step(names, monkeypatch):
    monkeypatch.setattr(worker, "READ_IN_A_STEP", 1)
    backend = Reads()
    machine = machine_of(backend, "ab")
    for _ in range(3):
        machine.step(0.0)
    for name in names:
        opening = open_message(seq=name, output=TRUE[:7], plan=Plan(0), max_tokens=16)
        machine.receive(structs.replace(opening, suspects=f"R/{name}"), 0.0)
    machine.take_outbox()
    backend.batches.clear()
    gap, most = 0, 0
    for _ in range(200):
        for message in machine.take_outbox().get("R", []):
            machine.receive(Ack(message.seq, message.epoch, message.prefix_hash.length), 0.0)
        sequences = {sequence.seq: sequence for sequence in machine._sequences}
        if all(len(sequences[name].log) > 9 for name in names):
            break
        before = len(sequences["a"].log)
        machine.step(0.0)
        has_gone_on = len(sequences["a"].log) > before or sequences["a"].finish is not None
        gap = 0 if has_gone_on else gap + 1
        most = max(most, gap)
    assert most == 1
    assert next(batch for batch in keys(machine) if "c" in batch) == ("c",)


def test_suspects_whose_tokens_are_lost_in_each_step_of_others_have_steps_in_a_row():
    class Small(Oracle):
        """Has room for those of one step; a prompt takes three steps."""

        def verify(self, jobs):
            self.num_read = Counter({job.key: self.num_read[job.key] + 1 for job in jobs})
            return super().verify(jobs)

        def _decide(self, job):
            is_read = self.num_read[job.key] >= 3 or job.key != "c"
            return super()._decide(job) if is_read else Verification(Status.PREFILLING)

    backend = Small(true=TRUE * 10)
    backend.num_read = Counter()
    machine = machine_of(backend, "")
    for name in "abc":
        machine.receive(open_message(seq=name, plan=Plan(0), max_tokens=90), 0.0)
    machine._groups.divide([sequence for sequence in machine._sequences if sequence.seq == "c"])
    for _ in range(20):
        machine.step(0.0)
        for sequence in machine._sequences:
            sequence.acked = len(sequence.log)
    assert keys(machine)[:4] == [("c",), ("a", "b")] * 2
    assert min(len(sequence.log) for sequence in machine._sequences) > 4


def test_suspects_that_find_no_room_leave_the_step_to_others():
    class Full(Oracle):
        def _decide(self, job):
            return Verification(Status.WAITING) if job.key == "b" else super()._decide(job)

    machine = machine_of(Full(), "ab")
    machine._groups.divide([sequence for sequence in machine._sequences if sequence.seq == "b"])
    assert machine.step(0.0)
    assert keys(machine) == [("b",), ("a",)]
    assert machine.metrics()["num_waiting_sequences"] == 1


def test_a_lost_device_fails_the_machine():
    machine = machine_of(Faulty(poison="a", error=DeviceLostError("assert")), "ab")
    with pytest.raises(DeviceLostError):
        machine.step(0.0)


class FaultyDraft:
    """Proposes 5 for ever; raises, or fails, for one sequence and its branches."""

    max_model_len = 100

    def __init__(self, *, poison=None, failing=None, suspect=None):
        self.poison, self.failing = poison, failing or suspect
        self.status = Status.SUSPECT if suspect else Status.FAILED
        self.batches, self.held = [], set()

    def propose(self, jobs):
        seqs = [job.fork_of or job.key for job in jobs]
        self.batches.append(seqs)
        if self.poison in seqs:
            raise MemoryError
        self.held |= {job.key for job in jobs}
        proposal = Proposal(Status.DECIDED, 5, guesses=(6, 7))
        return [Proposal(self.status) if seq == self.failing else proposal for seq in seqs]

    def rest(self):
        pass

    def rename(self, key, new_key):
        pass

    def release(self, key):
        self.held.discard(key)


@pytest.mark.parametrize("how", ["poison", "failing", "suspect"])
def test_a_drafter_skips_what_fails_and_drafts_for_the_others(how):
    backend = FaultyDraft(**{how: "b"})
    machine = DrafterMachine("D", backend, TIMES)
    for name in "abc":
        machine.receive(open_message(seq=name, plan=Plan(3, 2)), 0.0)
    for _ in range(20):
        machine.step(0.0)
    offered = {message.seq for message in machine.take_outbox()["R"]}
    assert offered == {"a", "c"}
    report = machine.metrics()
    assert report["num_skipped_sequences"] == 1
    assert report["num_failed_steps"] == (3 if how == "poison" else 0)
    assert sum(seqs.count("b") > 0 for seqs in backend.batches) == {"poison": 3, "failing": 1, "suspect": 2}[how]
    assert not any(key.startswith("b") for key in backend.held)
