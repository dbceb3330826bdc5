from __future__ import annotations

import pytest

from specdec.core.backends import Status, Verification
from specdec.core.messages import (
    Ack,
    Epoch,
    Live,
    Notes,
    Offer,
    Open,
    Plan,
    PlanUpdate,
    Verdict,
)
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.types import TokenLogprobs
from specdec.protocol.leases import Times
from specdec.protocol.target import TargetMachine
from tests.letters import provenance
from tests.specdec.protocol.scripted import EOS, PROMPT, log_of

TIMES = Times(lease_s=5.0, retry_interval_s=0.5, max_unacked_tokens=6)
TRUE = (3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7, 8, 9, 3, 4)
EPOCH = Epoch(1, 0)


class Oracle:
    """Decides ``true``, whatever the draft; always has room."""

    def __init__(self, true=TRUE, max_model_len=100):
        self.true, self.max_model_len = true, max_model_len
        self.batches, self.released = [], []

    def verify(self, jobs):
        self.batches.append([(job.key, job.draft) for job in jobs])
        return [self._decide(job) for job in jobs]

    def _decide(self, job):
        true = self.true[len(job.log) - len(PROMPT) :]
        n = next((i for i, token in enumerate(job.draft) if token != true[i]), len(job.draft))
        return Verification(Status.DECIDED, true[: n + 1], n, len(job.draft))

    def release(self, key):
        self.released.append(key)


def open_message(output=(), epoch=EPOCH, plan=None, seq="s", **spec):
    spec = {"sampling": SamplingParams(), "max_tokens": 12, "eos_token_ids": (EOS,), **spec}
    spec = SequenceSpec(seed=0, output_start=len(PROMPT), **spec)
    return Open(seq, epoch, "R", SharedTokens((*PROMPT, *output)), spec, plan or Plan(8), TIMES.lease_s)


def offer(committed, chain, epoch=EPOCH):
    return Offer("s", epoch, log_of(committed).prefix_hash(), tuple(chain))


def machine_with(*messages, **backend):
    machine = TargetMachine("T", Oracle(**backend), TIMES)
    for message in messages:
        machine.receive(message, 0.0)
    return machine


def verdicts(machine):
    return machine.take_outbox().get("R", [])


def verdict(base, tokens, notes, finish=None, epoch=EPOCH):
    prefix_hash = log_of((*TRUE[:base], *tokens)).prefix_hash()
    return Verdict("s", epoch, len(PROMPT) + base, tuple(tokens), notes, prefix_hash, finish)


@pytest.mark.parametrize(
    ("chain", "run", "notes"),
    [
        ((), TRUE[:1], Notes(provenance("p"), (0,))),
        (TRUE[:3], TRUE[:4], Notes(provenance("aaab"), (0, 0, 0, 3))),
        ((3, 4, 9), TRUE[:3], Notes(provenance("aac"), (0, 0, 3))),
        ((9, 4, 5), TRUE[:1], Notes(provenance("c"), (3,))),
    ],
)
def test_a_round(chain, run, notes):
    machine = machine_with(open_message(), *([offer((), chain)] if chain else []))
    assert machine.step(0.0)
    assert verdicts(machine) == [verdict(0, run, notes)]


def test_rounds_are_told_one_by_one_though_nobody_took_the_outbox_between_them():
    machine = machine_with(open_message(), offer((), TRUE[:2]))
    machine.step(0.0)
    machine.step(0.0)
    machine.receive(Ack("s", EPOCH, len(PROMPT) + 3), 0.0)
    machine.step(0.0)
    assert verdicts(machine) == [
        verdict(0, TRUE[:3], Notes(provenance("aab"), (0, 0, 2))),
        verdict(0, TRUE[:4], Notes(provenance("aabp"), (0, 0, 2, 0))),
        verdict(3, TRUE[3:5], Notes(provenance("pp"), (0, 0))),
    ]


@pytest.mark.parametrize(
    ("opened", "backend", "most"),
    [
        ({"plan": Plan(3)}, {}, 3),
        ({"plan": Plan(0)}, {}, 0),
        ({}, {}, TIMES.max_unacked_tokens - 1),
        ({"max_tokens": 3}, {}, 2),
        ({"max_tokens": 1}, {}, 0),
        ({}, {"max_model_len": len(PROMPT) + 4}, 3),
    ],
)
def test_a_draft_is_cut_to_what_may_be_committed(opened, backend, most):
    machine = machine_with(open_message(**opened), offer((), TRUE[:10]), **backend)
    machine.step(0.0)
    assert machine._backend.batches == [[("s", TRUE[:most])]]


def test_the_longest_rest_among_the_kept_offers_is_used():
    offers = [offer((), TRUE[:2]), offer((), TRUE[:4]), offer((), TRUE[:3]), offer((8,), TRUE)]
    machine = machine_with(open_message(), *offers)
    machine.step(0.0)
    assert machine._backend.batches == [[("s", TRUE[:4])]]
    assert (machine.counters.num_offers, machine.counters.num_stale_offers) == (4, 1)


@pytest.mark.parametrize(
    ("true", "spec", "backend", "run", "notes", "finish"),
    [
        ((3, EOS, 5, 6), {}, {}, (3, EOS), Notes(provenance("aa"), (0, 3)), "stop"),  # nothing after it is committed
        ((3, 4, 5, EOS), {}, {}, (3, 4, 5, EOS), Notes(provenance("aaab"), (0, 0, 0, 3)), "stop"),
        ((3, 4, 5, 6), {"max_tokens": 2}, {}, (3, 4), Notes(provenance("ab"), (0, 1)), "length"),
        ((3, 4, 5, 6), {}, {"max_model_len": len(PROMPT) + 2}, (3, 4), Notes(provenance("ab"), (0, 1)), "length"),
    ],
)
def test_finish_is_decided_while_a_run_is_walked(true, spec, backend, run, notes, finish):
    machine = machine_with(open_message(**spec), offer((), true[:3]), true=true, **backend)
    machine.step(0.0)
    (sent,) = verdicts(machine)
    assert (sent.tokens, sent.notes, sent.finish) == (run, notes, finish)
    assert machine._backend.released == ["s"]
    assert not machine.step(0.0)
    machine.step(0.5)
    assert verdicts(machine) == [sent]  # until Close


def test_live_may_give_a_longer_lease():
    machine = machine_with(open_message())
    machine.receive(Live("R", (("s", EPOCH),), 5 * TIMES.lease_s), 0.0)
    machine.step(4 * TIMES.lease_s)
    assert len(machine._backend.batches) == 1


def test_sequences_are_served_in_order_of_priority_then_of_arrival():
    low, high = open_message(seq="d", priority=1), open_message(seq="e", priority=-1, arrival_s=2.0)
    machine = machine_with(
        low, open_message(seq="b", arrival_s=1.0), open_message(seq="c"), open_message(seq="a"), high
    )
    machine.step(0.0)
    assert [key for key, _ in machine._backend.batches[0]] == ["e", "a", "c", "b", "d"]


def test_a_row_waits_for_an_offer_only_as_long_as_its_plan_says():
    machine = machine_with(open_message(plan=Plan(3, mode="sequential", draft_wait_s=0.2)))
    assert machine.step(0.0)  # never before the first token
    assert not machine.step(0.1)
    machine.receive(offer(TRUE[:1], TRUE[1:3]), 0.1)
    assert machine.step(0.1)
    assert not machine.step(0.2)
    assert machine.step(0.4)
    machine.receive(PlanUpdate("s", EPOCH, Plan(0)), 0.4)
    assert machine.step(0.4)
    assert [batch[0][1] for batch in machine._backend.batches] == [(), TRUE[1:3], (), ()]


def test_sequential_a_row_waits_after_a_step_that_took_longer_than_the_wait():
    machine = machine_with(open_message(plan=Plan(3, mode="sequential", draft_wait_s=1.0)))
    assert machine.step(0.0)
    assert not machine.step(2.0)
    assert not machine.step(2.9)
    machine.receive(offer(TRUE[:1], TRUE[1:4]), 2.9)
    assert machine.step(2.9)
    assert not machine.step(3.5)
    assert machine.step(4.5)
    assert [batch[0][1] for batch in machine._backend.batches] == [(), TRUE[1:4], ()]


def test_counters():
    machine = machine_with(open_message(), offer((), (3, 4, 9)))
    for _ in range(2):
        machine.step(0.0)
    report = machine.metrics()
    expected = {"num_rounds": 2, "num_drafts": 1, "num_draft_tokens": 3, "num_accepted_tokens": 2, "num_steps": 2}
    assert {name: report[name] for name in expected} == expected
    assert (report["num_committed_tokens"], report["num_sequences"]) == (4, 1)
    assert [report.get(f"num_accepted_tokens_per_pos/{i}") for i in range(3)] == [1, 1, None]


class TellingOracle(Oracle):
    """Tells of the prompt with the first token."""

    def _decide(self, job):
        told = (None, *[TokenLogprobs(-1.0, 1)] * 1999) if len(job.log) == len(PROMPT) else None
        return super()._decide(job)._replace(prompt_logprobs=told)


def test_what_tells_of_a_prompt_is_sent_once_until_it_is_acknowledged_and_nothing_follows_it():
    machine = TargetMachine("T", TellingOracle(), TIMES)
    machine.receive(open_message(), 0.0)
    assert machine.step(0.0)
    (first,) = verdicts(machine)
    assert len(first.notes.prompt_logprobs) == 2000
    for now_s in (0.1, 0.6, 1.4):
        assert not machine.step(now_s)
        assert verdicts(machine) == []
    assert not machine.step(1.5)
    assert verdicts(machine) == [first], "it may be lost"
    machine.receive(Ack("s", EPOCH, len(PROMPT) + 1), 1.6)
    assert machine.step(1.6)
    (second,) = verdicts(machine)
    assert (second.tokens, second.notes.prompt_logprobs) == (TRUE[1:2], None)


def test_a_verdict_that_is_too_long_to_be_sent_ends_its_sequence_with_an_error():
    machine = TargetMachine("T", TellingOracle(), TIMES)
    machine.receive(open_message(), 0.0)
    machine.step(0.0)
    (first,) = verdicts(machine)
    machine.unsendable(first, "too long", 0.1)
    machine.step(0.1)
    (told,) = verdicts(machine)
    assert (told.tokens, told.finish, told.reason, told.notes.prompt_logprobs) == (TRUE[:1], "error", "too long", None)


def test_a_newer_inc_replaces_the_log_and_an_older_one_does_not():
    machine = machine_with(open_message())
    machine.step(0.0)
    machine.receive(open_message(TRUE[:5], Epoch(2, 0)), 0.0)
    machine.receive(open_message((), Epoch(1, 1)), 0.0)
    machine.step(0.0)
    assert verdicts(machine)[-1] == verdict(5, TRUE[5:6], Notes(provenance("p"), (0,)), epoch=Epoch(2, 0))
    assert machine._backend.released == []  # what is cached is reused
