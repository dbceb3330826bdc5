from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replace_struct

from specdec.core.messages import (
    Ack,
    Alive,
    Close,
    Commit,
    End,
    Epoch,
    Live,
    NewTokens,
    Notes,
    Offer,
    Open,
    Plan,
    Resync,
    Submit,
    Verdict,
    Want,
)
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.types import PackedLogprobs, TokenLogprobs
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from tests.letters import provenance
from tests.specdec.protocol.scripted import PROMPT, log_of

TIMES = Times(lease_s=5.0, renew_interval_s=1.0, renew_grace_s=0.5, peer_timeout_s=4.0)
SPEC = SequenceSpec(SamplingParams(), 0, len(PROMPT), 12)
PLAN = Plan(3)
P = len(PROMPT)


def router(*workers, plan=PLAN, **options):
    machine = RouterMachine("R", lambda spec: plan, TIMES, **options)
    for name in workers:
        join(machine, name)
    return machine


def join(machine, name, now_s=0.0):
    machine.worker_joined(name, "target" if name.startswith("T") else "drafter", now_s)


def submit(machine, seq="s", attempt=1, output=(), now_s=0.0, spec=SPEC):
    machine.receive(Submit(seq, attempt, "I", SharedTokens(PROMPT), spec, output=tuple(output)), now_s)


def submitted(*workers, plan=PLAN, spec=SPEC, **options):
    """A router with one session, whose openings are sent."""
    machine = router(*workers, plan=plan, **options)
    submit(machine, spec=spec)
    machine.take_outbox()
    return machine


def opened(n=0, output=(), attempt=1, seq="s", plan=PLAN, suspects=""):
    return Open(
        *(seq, Epoch(attempt, n), "R", SharedTokens(PROMPT), SPEC, plan, TIMES.lease_s),
        suspects=suspects,
        output=tuple(output),
    )


def notes(tokens):
    return Notes(provenance("p" * len(tokens)), (0,) * len(tokens))


def verdict(base, tokens, whole=None, n=0, finish=None, attempt=1):
    prefix_hash = log_of(range(base) if whole is None else whole[:base])
    prefix_hash.extend(tokens)
    return Verdict("s", Epoch(attempt, n), P + base, tuple(tokens), notes(tokens), prefix_hash.prefix_hash(), finish)


def new_tokens(base, tokens, whole, attempt=1):
    return NewTokens("s", attempt, P + base, tuple(tokens), notes(tokens), log_of(whole).prefix_hash(), PLAN)


def commit(base, tokens, whole, n=0):
    return Commit("s", Epoch(1, n), P + base, tuple(tokens), log_of(whole).prefix_hash())


def test_a_submitted_sequence_is_opened_on_a_target_and_a_drafter():
    machine = router("T0", "D0")
    submit(machine)
    assert machine.take_outbox() == {"T0": [opened()], "D0": [opened()]}
    submit(machine)
    assert machine.take_outbox() == {}


def test_where_nothing_is_drafted_no_drafter_is_bothered():
    machine = router("T0", "D0", plan=Plan(0))
    submit(machine)
    assert machine.take_outbox() == {"T0": [opened(plan=Plan(0))]}
    machine.receive(verdict(0, (0,)), 0.0)
    assert set(machine.take_outbox()) == {"T0", "I"}


def test_sequences_go_to_the_least_loaded_worker():
    machine = router("T0", "T1")
    for seq in ("a", "b", "c", "d"):
        submit(machine, seq)
    assert {peer: len(messages) for peer, messages in machine.take_outbox().items()} == {"T0": 2, "T1": 2}


def test_without_workers_a_sequence_waits_for_one_of_each_kind():
    machine = router()
    submit(machine)
    assert machine.take_outbox() == {}
    join(machine, "D0")
    assert machine.take_outbox() == {"D0": [opened()]}
    join(machine, "T0")
    assert machine.take_outbox() == {"T0": [opened()]}


def test_sequences_without_the_drafter_of_their_plan_are_counted():
    machine = router("T0")
    submit(machine, "a")
    submit(machine, "b")
    assert machine.metrics()["num_without_drafter"] == 2
    join(machine, "D0")
    assert machine.metrics()["num_without_drafter"] == 0
    submit(machine, "c")
    machine.worker_lost("D0", 0.0)
    assert machine.metrics()["num_without_drafter"] == 3


def test_a_verdict_is_acknowledged_committed_and_told():
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0, 1)), 0.0)
    assert machine.take_outbox() == {
        "T0": [Ack("s", Epoch(1, 0), P + 2)],
        "D0": [commit(0, (0, 1), (0, 1))],
        "I": [new_tokens(0, (0, 1), (0, 1))],
    }


def test_the_drafter_hears_of_a_verdict_first():
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (5, 6)), 0.1)
    assert list(machine.take_outbox()) == ["D0", "T0", "I"]


def test_a_commit_follows_the_last_and_is_repeated_from_the_mark_of_the_last_offer():
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0, 1)), 0.0)
    machine.receive(verdict(2, (2,)), 0.0)
    machine.receive(Offer("s", Epoch(1, 0), log_of((0, 1)).prefix_hash(), (4, 5)), 0.0)
    machine.receive(verdict(3, (3,)), 0.0)
    assert machine.take_outbox()["D0"] == [
        commit(0, (0, 1), (0, 1)),
        commit(2, (2,), (0, 1, 2)),
        commit(3, (3,), (0, 1, 2, 3)),
    ]
    machine.step(0.0)
    assert commit(2, (2, 3), (0, 1, 2, 3)) in machine.take_outbox()["D0"]


def test_new_times_hold_for_what_is_open_before_the_old_lease_runs_out():
    machine = submitted("T0", plan=Plan(0))
    machine.step(1.0)
    machine.take_outbox()
    machine.set_times(replace(TIMES, lease_s=60.0, renew_interval_s=20.0))
    machine.receive(Want("s", 1, "I", P), 1.0)
    machine.step(1.1)
    assert machine.take_outbox()["T0"] == [Live("R", (("s", Epoch(1, 0)),), 60.0)]
    machine.step(20.0)
    assert len(machine._sessions) == 1


def test_an_unknown_workers_heartbeat_is_ignored():
    machine = submitted("T0")
    machine.receive(Alive("T9"), 0.0)
    assert set(machine.worker_metrics()) == {"T0"}


def test_a_sequence_that_is_too_long_to_be_opened_ends_with_an_error_and_no_other_does():
    machine = submitted("T0", "D0")
    submit(machine, seq="t")
    machine.take_outbox()
    machine.unsendable(opened(), "too long", 0.0)
    sent = machine.take_outbox()
    prefix_hash = log_of(()).prefix_hash()
    assert sent["I"] == [End("s", 1, prefix_hash, "error", "too long")]
    assert sent["T0"] == [Close("s", Epoch(1, 0))]
    machine.unsendable(opened(), "too long", 0.0)  # of the drafter's link, too
    assert machine.take_outbox() == {}
    assert len(machine._sessions) == 2


def test_what_tells_of_a_prompt_is_sent_to_the_ingress_once_and_again_only_much_later():
    """An ingress that wants more while it is on its way gets no second copy."""
    machine = submitted("T0", "D0")
    told = PackedLogprobs.pack((None, *[TokenLogprobs(-1.0, 1)] * 8000))
    first = verdict(0, (3,))
    machine.receive(replace_struct(first, notes=replace_struct(first.notes, prompt_logprobs=told)), 0.0)
    again = verdict(1, (4,), whole=(3,))
    machine.receive(again, 0.1)
    sent = [message.notes.prompt_logprobs for message in machine.take_outbox()["I"]]
    assert sent == [told, None]
    want = Want("s", 1, "I", P)
    for now_s in (0.2, 1.0, 4.0):
        machine.receive(want, now_s)
        assert machine.take_outbox() == {}
    machine.receive(want, 5.0)
    (message,) = machine.take_outbox()["I"]
    assert (message.tokens, message.notes.prompt_logprobs) == ((3, 4), told)
    machine.receive(replace_struct(want, have=P + 1), 5.1)
    (message,) = machine.take_outbox()["I"]
    assert (message.tokens, message.notes.prompt_logprobs) == ((4,), None), "it has arrived: it is never sent again"


def test_a_target_that_always_has_another_history_is_not_opened_without_end():
    machine = submitted("T0", plan=Plan(0), max_reopens=3)
    for n in range(3):
        machine.receive(verdict(1, (1,), whole=(9,), n=n), 0.0)
        assert machine.take_outbox() == {"T0": [opened(n=n + 1, plan=Plan(0))]}
    machine.receive(verdict(1, (1,), whole=(9,), n=3), 0.0)
    sent = machine.take_outbox()
    assert sent["T0"] == [Close("s", Epoch(1, 3))]
    (end,) = [message for message in sent["I"] if isinstance(message, End)]
    assert end.finish == "error"
    assert "another history" in end.reason


def test_a_target_that_goes_on_in_between_may_have_another_history_again():
    machine = submitted("T0", plan=Plan(0), max_reopens=1)
    for n in range(4):
        machine.receive(verdict(n, (n,), n=n), 0.0)
        machine.receive(verdict(n + 2, (1,), whole=(9,) * 8, n=n), 0.0)
    sent = machine.take_outbox()
    assert [message.epoch.n for message in sent["T0"] if isinstance(message, Open)] == [1, 2, 3, 4]
    assert not any(isinstance(message, End) for message in sent["I"])


def test_a_drafter_that_always_has_another_history_drafts_no_more_and_the_sequence_goes_on():
    machine = submitted("T0", "D0", max_reopens=3)
    for n in range(4):
        machine.receive(Resync("D0", "s", Epoch(1, n), P, "mismatch"), 0.0)
    sent = machine.take_outbox()
    assert sent == {"D0": [*(opened(n=n) for n in (1, 2, 3)), Close("s", Epoch(1, 3))]}
    machine.receive(verdict(0, (0,)), 0.0)
    sent = machine.take_outbox()
    assert "D0" not in sent
    assert sent["T0"] == [Ack("s", Epoch(1, 0), P + 1)]
    assert not any(isinstance(message, End) for message in sent["I"])
