from __future__ import annotations

import pytest

from specdec.core.backends import Proposal, Status
from specdec.core.messages import Commit, Epoch, Offer, Open, Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import SpeculationMode
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from tests.specdec.protocol.scripted import PROMPT, log_of

EPOCH = Epoch(1, 0)


class Counting:
    """Proposes 100 + position, so that what follows depends on nothing but where it stands."""

    def __init__(self, max_model_len=100):
        self.max_model_len = max_model_len
        self.room, self.batches, self.released, self.rests = 9, [], [], []

    def propose(self, jobs):
        self.batches.append([(job.key, len(job.tokens), job.agreed, job.num_committed) for job in jobs])
        decided = [Proposal(Status.DECIDED, chain(len(job.tokens) - len(PROMPT), 1)[0]) for job in jobs[: self.room]]
        return decided + [Proposal(Status.WAITING) for _ in jobs[self.room :]]

    def rest(self):
        self.rests.append(len(self.batches))

    def release(self, key):
        self.released.append(key)


def chain(start, length):
    """What the backend proposes after ``start`` output tokens."""
    return tuple(range(100 + start, 100 + start + length))


def machine_with(num_draft_tokens=3, mode: SpeculationMode = "sequential", max_tokens=50, max_model_len=100):
    machine = DrafterMachine("D", Counting(max_model_len), Times(lease_s=5.0))
    open_sequence(machine, "s", Plan(num_draft_tokens, mode=mode), max_tokens)
    return machine


def open_sequence(machine, seq, plan, max_tokens=50, epoch=EPOCH, output=()):
    spec = SequenceSpec(SamplingParams(), 0, len(PROMPT), max_tokens)
    machine.receive(Open(seq, epoch, "R", (*PROMPT, *output), spec, plan, 5.0), 0.0)


def commit(machine, committed, new):
    """The router reports ``new`` after ``committed``."""
    prefix_hash = log_of((*committed, *new)).prefix_hash()
    machine.receive(Commit("s", EPOCH, len(PROMPT) + len(committed), tuple(new), prefix_hash), 0.0)


def settle(machine):
    """Draft until there is nothing to draft; returns what was sent."""
    while machine.step(0.0):
        pass
    return machine.take_outbox().get("R", [])


def offer(committed, tokens):
    return Offer("s", EPOCH, log_of(committed).prefix_hash(), tuple(tokens))


def test_sequential_a_chain_ends_at_the_draft_length_and_is_offered_once():
    machine = machine_with(3)
    assert settle(machine) == [offer((), chain(0, 3))]
    assert settle(machine) == []


def test_in_overlap_it_goes_on_for_another_round_and_is_offered_after_each_step():
    machine = machine_with(4, "overlap")
    assert settle(machine) == [offer((), chain(0, length)) for length in range(1, 10)]


@pytest.mark.parametrize(("mode", "length"), [("sequential", 3), ("overlap", 7)])
def test_a_commit_that_agrees_keeps_the_rest_of_the_chain(mode, length):
    machine = machine_with(3, mode)
    settle(machine)
    commit(machine, (), chain(0, 2))
    before = len(machine._backend.batches)
    assert settle(machine)[-1] == offer(chain(0, 2), chain(2, length))
    assert len(machine._backend.batches) == before + 2  # only what is missing is drafted
    assert machine.counters.num_discarded_tokens == 0


def test_in_overlap_a_round_accepted_in_full_leaves_a_whole_draft():
    machine = machine_with(3, "overlap")
    settle(machine)
    commit(machine, (), chain(0, 4))  # three accepted, and the bonus token as foreseen
    assert machine._sequences.get("s").path.tokens == list(chain(4, 3))


def test_a_commit_that_differs_drops_the_chain_from_there():
    machine = machine_with(3)
    settle(machine)
    commit(machine, (), (100, 9))
    assert settle(machine) == [offer((100, 9), chain(2, 3))]
    job = machine._backend.batches[3][0]
    assert job == ("s", len(PROMPT) + 2, len(PROMPT) + 1, len(PROMPT) + 2)  # only the prompt and 100 stood there before
    assert (machine.counters.num_kept_tokens, machine.counters.num_discarded_tokens) == (1, 2)
    assert (machine.counters.num_right_tokens, machine.counters.num_wrong_tokens) == (1, 1)


def test_in_overlap_a_commit_that_differs_has_a_new_chain_offered_from_its_first_token_on():
    machine = machine_with(4, "overlap")
    settle(machine)
    commit(machine, (), (9,))
    assert settle(machine) == [offer((9,), chain(1, length)) for length in range(1, 10)]


@pytest.mark.parametrize("mode", ["sequential", "overlap"])
def test_beyond_the_draft_models_context_nothing_is_drafted(mode):
    machine = machine_with(3, mode, max_model_len=len(PROMPT) + 2)
    assert settle(machine)[-1] == offer((), chain(0, 2))
    commit(machine, (), chain(0, 1))
    assert settle(machine) == []
    commit(machine, chain(0, 1), chain(1, 4))
    assert settle(machine) == []
    assert max(length for batch in machine._backend.batches for _, length, _, _ in batch) <= len(PROMPT) + 2


@pytest.mark.parametrize(("max_tokens", "length"), [(1, 0), (2, 1), (3, 2), (9, 3)])
def test_nothing_is_drafted_that_max_tokens_would_cut(max_tokens, length):
    """The last token needs no draft: the target decides it in any case."""
    sent = settle(machine_with(3, max_tokens=max_tokens))
    assert sent == ([offer((), chain(0, length))] if length else [])


def test_without_a_draft_length_nothing_is_drafted():
    assert settle(machine_with(0, "overlap")) == []


def test_a_waiting_sequence_keeps_what_was_agreed():
    machine = machine_with(3)
    machine.step(0.0)
    machine._backend.room = 0
    assert not machine.step(0.0)
    machine._backend.room = 9
    machine.step(0.0)
    agreed = [batch[0][2] for batch in machine._backend.batches]
    assert agreed == [0, len(PROMPT), len(PROMPT)]


def test_it_rests_where_a_step_finds_nothing_to_draft():
    machine = machine_with(2)
    settle(machine)
    assert machine._backend.rests == [2]
    commit(machine, (), chain(0, 1))
    assert machine.step(0.0)
    assert machine._backend.rests == [2]


def test_it_rests_where_a_step_finds_no_room():
    machine = machine_with(2)
    machine._backend.room = 0
    assert not machine.step(0.0)
    assert machine._backend.rests == [1]


def test_a_step_of_all_sequences_is_one_message_to_each_router():
    machine = machine_with(2)
    open_sequence(machine, "t", Plan(2, mode="sequential"))
    assert machine.step(0.0)
    machine.take_outbox()
    assert machine.step(0.0)
    outbox = machine.take_outbox()
    assert list(outbox) == ["R"]
    assert {sent.seq for sent in outbox["R"] if isinstance(sent, Offer)} == {"s", "t"}
