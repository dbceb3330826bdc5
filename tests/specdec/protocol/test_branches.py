"""What a drafter prepares for the outcomes of a verification that still runs, and what it sends of that."""

from __future__ import annotations

import pytest

from specdec.core.backends import DraftJob, Proposal, Status
from specdec.core.messages import Close, Commit, Epoch, Open, Outcome, Plan, PlanUpdate
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.branches import foreseen, likely_outcomes
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from tests.specdec.protocol.scripted import PROMPT, log_of

EPOCH = Epoch(1, 0)
EOS = 0


def said(tokens) -> int:
    """The drafter's next token, told from the last token and the length."""
    return 100 + (tokens[-1] * 7 + len(tokens) * 13) % 800


def path(start, length) -> tuple[int, ...]:
    """What it says after some output tokens, and after that."""
    tokens = [*PROMPT, *start]
    for _ in range(length):
        tokens.append(said(tokens))
    return tuple(tokens[len(PROMPT) + len(start) :])


class Guessing:
    """Guesses the numbers that follow what it says."""

    max_model_len = 100

    def __init__(self) -> None:
        self.has_room_for, self.batches, self.events = {"chains", "branches"}, [], []

    def propose(self, jobs: list[DraftJob]) -> list[Proposal]:
        self.batches.append([job._replace(tokens=list(job.tokens)) for job in jobs])
        return [self._propose(job) for job in jobs]

    def _propose(self, job: DraftJob) -> Proposal:
        if ("chains" if job.fork_of is None else "branches") not in self.has_room_for:
            return Proposal(Status.WAITING)
        token = said(job.tokens)
        return Proposal(Status.DECIDED, token, tuple(range(token + 1, token + 1 + job.num_guesses)))

    def rest(self) -> None:
        pass

    def rename(self, key: str, new_key: str) -> None:
        self.events.append(("rename", key, new_key))

    def release(self, key: str) -> None:
        self.events.append(("release", key))


def machine_with(num_draft_tokens=3, num_branches=4, max_tokens=50, **plan):
    machine = DrafterMachine("D", Guessing(), Times(lease_s=5.0))
    spec = SequenceSpec(SamplingParams(), 0, len(PROMPT), max_tokens, (EOS,))
    plan = Plan(num_draft_tokens, num_branches, 0.5, **plan)
    machine.receive(Open("s", EPOCH, "R", PROMPT, spec, plan, 5.0), 0.0)
    return machine


def commit(machine, committed, new, seq="s"):
    prefix_hash = log_of((*committed, *new)).prefix_hash()
    machine.receive(Commit(seq, EPOCH, len(PROMPT) + len(committed), tuple(new), prefix_hash), 0.0)


def settle(machine, steps=99):
    while steps and machine.step(0.0):
        steps -= 1
    return machine.take_outbox().get("R", [])


def sequence_of(machine):
    return machine._sequences.get("s")


# The fan-out.


def counts_of(num_branches, num_verified, rate):
    places = [n for n, _ in foreseen(num_branches, num_verified, rate)]
    return [places.count(n) for n in range(num_verified + 1)]


def test_fan_out_falls_with_the_number_accepted():
    counts = counts_of(16, 6, 0.7)
    assert sum(counts) == 16
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 3
    assert foreseen(16, 6, 0.7)[:2] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9])
def test_fan_out_is_near_the_formula(rate):
    """F_n = F_0 a**(n / (1 + r)) with r = 1, where there are branches enough to see it."""
    counts = counts_of(2000, 4, rate)
    for n in range(5):
        assert counts[n] / counts[0] == pytest.approx(rate ** (n / 2), rel=0.05)


def test_fan_out_at_its_ends():
    assert foreseen(3, 0, 0.7) == [(0, 0), (0, 1), (0, 2)]
    assert foreseen(2, 4, 0.0) == [(0, 0), (0, 1)]
    assert len(foreseen(3, 4, 1.0)) == 3
    assert foreseen(0, 4, 0.5) == []


def test_where_the_draft_is_in_doubt_there_are_more_branches():
    sure, torn = (0.98, 0.01, 0.01), (0.5, 0.3, 0.2)
    assert foreseen(3, 2, 0.7, (sure, torn, sure)) == [(1, 0), (1, 1), (0, 0)]
    assert foreseen(2, 1, 0.7, ((0.1, 0.2, 0.7), sure)) == [(0, 1), (0, 0)]
    assert foreseen(4, 1, 0.9, (sure,))[:2] == [(1, 0), (1, 1)]  # what is not drafted yet is as usual: 0.1 / 2, / 6
    assert foreseen(4, 1, 0.9, ((), ())) == foreseen(4, 1, 0.9)


def test_outcomes_are_named_as_far_as_the_chain_is_drafted():
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2)]
    assert likely_outcomes(places, [(5, 6), (7,)]) == [Outcome(0, 5), Outcome(1, 7), Outcome(0, 6)]


# What is drafted and offered.


def test_after_the_chain_come_branches_and_then_nothing():
    machine = machine_with()
    offers = settle(machine)
    assert [len(offer.chain) for offer in offers[:3]] == [1, 2, 3]
    last, chain = offers[-1], path((), 7)
    assert last.chain == chain
    assert last.prefix_hash == log_of(()).prefix_hash()
    assert 0 < len(last.branches) <= 4
    for (n, token), drafted in last.branches:
        assert token > chain[n]  # one of its guesses
        assert drafted == path((*chain[:n], token), 3)
    assert len(offers) <= 8
    assert settle(machine) == []
    # What names the outcomes after a whole draft is ready, and stays here.
    assert {len(branch.path) for branch in sequence_of(machine).branches.values()} == {4}


def test_branches_are_a_part_of_the_batch_and_come_last():
    machine = machine_with()
    settle(machine)
    batch = next(jobs for jobs in machine._backend.batches if len(jobs) > 1)
    assert [job.fork_of for job in batch] == [None] + ["s"] * (len(batch) - 1)
    assert all(job.num_guesses == batch[0].num_guesses > 0 for job in batch)
    branch = batch[1]
    assert branch.tokens[: branch.agreed] == batch[0].tokens[: branch.agreed]
    assert branch.agreed == len(branch.tokens) - 1


def test_nothing_is_drafted_after_a_token_that_ends_the_sequence():
    sequence = sequence_of(machine_with())
    assert sequence.take(None, Proposal(Status.DECIDED, EOS)) == 1
    assert sequence.num_wanted == len(sequence.path)
    assert sequence.fork(Outcome(0, EOS)) is None  # nothing could follow it


@pytest.mark.parametrize(("num_sequences", "each"), [(1, 4), (2, 4), (3, 3), (5, 2), (11, 0)])
def test_sequences_share_the_branches_in_all_evenly(num_sequences, each):
    machine = DrafterMachine("D", Guessing(), Times(lease_s=5.0), branches_in_all=10)
    spec = SequenceSpec(SamplingParams(), 0, len(PROMPT), 50, (EOS,))
    names = [f"s{i}" for i in range(num_sequences)]
    for seq in names:
        machine.receive(Open(seq, EPOCH, "R", PROMPT, spec, Plan(3, 4, acceptance_rate=0.5), 5.0), 0.0)
    for seq in ("plain", "in turn"):  # takes no part
        plan = Plan(3, 4 if seq == "in turn" else 0, mode="overlap" if seq == "plain" else "sequential")
        machine.receive(Open(seq, EPOCH, "R", PROMPT, spec, plan, 5.0), 0.0)
    last = {offer.seq: offer for offer in settle(machine)}
    assert [len(last[seq].branches) for seq in names] == [each] * num_sequences
    assert all(last[seq].chain == path((), 7) for seq in (*names, "plain"))  # ahead, with branches or without
    for seq in names[1:]:
        machine.receive(Close(seq, EPOCH), 0.0)
    commit(machine, (), path((), 1), names[0])
    offers = [offer for offer in settle(machine) if offer.seq == names[0]]
    assert (len(offers[-1].branches) == 4) == (each > 0)  # what was drafted without has no guesses


def test_an_outcome_that_was_not_foreseen_gets_a_new_chain_at_once():
    machine = machine_with()
    settle(machine)
    commit(machine, (), (9,))
    assert (sequence_of(machine).path.tokens, sequence_of(machine).branches, sequence_of(machine).num_verified) == (
        [],
        {},
        0,
    )
    offers = settle(machine, 3)
    assert [offer.chain for offer in offers] == [path((9,), length) for length in (1, 2, 3)]
    assert offers[-1].branches  # meanwhile the target decides a token plainly: which one?
    assert {outcome.num_accepted for outcome, _ in offers[-1].branches} == {0}


def test_what_branches_gain_is_offered_after_each_step():
    machine = machine_with(num_draft_tokens=4)
    settle(machine)
    settle_after_hit(machine)
    offers = settle(machine)
    assert [max(len(drafted) for _, drafted in offer.branches) for offer in offers[:4]] == [1, 2, 3, 4]
    assert {len(drafted) for _, drafted in offers[-1].branches} == {4}


def settle_after_hit(machine):
    sequence = sequence_of(machine)
    (position, token), branch = next(iter(sequence.branches.items()))
    n = position - len(sequence.log)
    commit(machine, (), (*sequence.path.tokens[:n], token))
    assert sequence.path is branch.path


def test_a_branch_without_room_is_not_offered_and_nothing_waits_for_it():
    machine = machine_with()
    machine._backend.has_room_for = {"chains"}
    offers = settle(machine)
    assert offers[-1].chain == path((), 7)
    assert offers[-1].branches == ()
    assert machine.metrics()["num_waiting_sequences"] == 0
    machine._backend.has_room_for = set()
    commit(machine, (), (9,))
    assert not machine.step(0.0)
    assert machine.metrics()["num_waiting_sequences"] == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_nothing_is_prepared_that_max_tokens_would_cut(max_tokens):
    machine = machine_with(max_tokens=max_tokens)
    for offer in settle(machine):
        assert len(offer.chain) < max_tokens
        assert all(n + 1 + len(drafted) < max_tokens for (n, _), drafted in offer.branches)


def test_no_branch_begins_with_a_token_that_ends_the_sequence():
    machine = machine_with()
    sequence = sequence_of(machine)
    sequence.ending_token_ids = frozenset(range(1000))
    assert not any(offer.branches for offer in settle(machine))


def test_a_miss_leaves_other_sequences_as_they_are():
    machine = machine_with()
    spec = SequenceSpec(SamplingParams(), 0, len(PROMPT), 50, (EOS,), arrival_s=1.0)
    machine.receive(Open("t", EPOCH, "R", PROMPT, spec, Plan(3, 4, 0.5), 5.0), 0.0)
    settle(machine)
    other = machine._sequences.get("t")
    held, tokens = dict(other.branches), list(other.tokens)
    machine._backend.batches.clear()
    commit(machine, (), (9,))
    settle(machine)
    assert (other.branches, other.tokens) == (held, tokens)
    assert {job.key.partition("#")[0] for batch in machine._backend.batches for job in batch} == {"s"}


def test_a_plan_with_more_branches_forks_them_at_once():
    machine = machine_with(num_branches=2)
    settle(machine)
    assert len(sequence_of(machine).branches) == 2
    machine.receive(PlanUpdate("s", EPOCH, Plan(3, 6, 0.5)), 0.0)
    machine.step(0.0)
    assert len(sequence_of(machine).branches) > 2


def test_a_plan_without_branches_drops_them():
    machine = machine_with()
    settle(machine)
    keys = {branch.key for branch in sequence_of(machine).branches.values()}
    machine.receive(PlanUpdate("s", EPOCH, Plan(3)), 0.0)
    settle(machine)
    assert {key for what, key in machine._backend.events if what == "release"} == keys


@pytest.mark.parametrize("mode", ["sequential", "overlap"])
def test_a_plan_with_a_shorter_chain_still_offers_what_there_is(mode):
    machine = machine_with(5, 0, mode=mode)
    settle(machine, 2)
    machine.receive(PlanUpdate("s", EPOCH, Plan(1, mode=mode)), 0.0)
    (offer,) = settle(machine)
    assert offer.chain[:2] == path((), 2)
    machine.receive(PlanUpdate("s", EPOCH, Plan(0)), 0.0)
    assert settle(machine) == []
