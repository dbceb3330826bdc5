from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from specdec.core.messages import (
    Ack,
    Alive,
    Cancel,
    Close,
    Commit,
    End,
    Gone,
    Inc,
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


def router(*workers, plan=PLAN):
    machine = RouterMachine("R", lambda spec: plan, TIMES)
    for name in workers:
        join(machine, name)
    return machine


def join(machine, name, now_s=0.0):
    machine.worker_joined(name, "target" if name.startswith("T") else "drafter", now_s)


def submit(machine, seq="s", attempt=1, output=(), now_s=0.0):
    machine.receive(Submit(seq, attempt, "I", SharedTokens(PROMPT), SPEC, output=tuple(output)), now_s)


def submitted(*workers, plan=PLAN):
    """A router with one session, whose openings are sent."""
    machine = router(*workers, plan=plan)
    submit(machine)
    machine.take_outbox()
    return machine


def opened(n=0, output=(), attempt=1, seq="s", plan=PLAN, suspects=""):
    return Open(
        *(seq, Inc(attempt, n), "R", SharedTokens(PROMPT), SPEC, plan, TIMES.lease_s),
        suspects=suspects,
        output=tuple(output),
    )


def notes(tokens):
    return Notes(provenance("p" * len(tokens)), (0,) * len(tokens))


def verdict(base, tokens, whole=None, n=0, finish=None, attempt=1):
    mark = log_of(range(base) if whole is None else whole[:base])
    mark.extend(tokens)
    return Verdict("s", Inc(attempt, n), P + base, tuple(tokens), notes(tokens), mark.mark(), finish)


def new_tokens(base, tokens, whole, attempt=1):
    return NewTokens("s", attempt, P + base, tuple(tokens), notes(tokens), log_of(whole).mark(), PLAN)


def commit(base, tokens, whole, n=0):
    return Commit("s", Inc(1, n), P + base, tuple(tokens), log_of(whole).mark())


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
    machine.receive(Submit("b", 1, "I", PROMPT, replace(SPEC, model="draft")), 0.0)
    assert machine.metrics()["num_without_drafter"] == 2, "b asks the draft model itself"
    join(machine, "D0")
    assert machine.metrics()["num_without_drafter"] == 0
    submit(machine, "c")
    machine.worker_lost("D0", 0.0)
    assert machine.metrics()["num_without_drafter"] == 3


def test_a_verdict_is_acknowledged_committed_and_told():
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0, 1)), 0.0)
    assert machine.take_outbox() == {
        "T0": [Ack("s", Inc(1, 0), P + 2)],
        "D0": [commit(0, (0, 1), (0, 1))],
        "I": [new_tokens(0, (0, 1), (0, 1))],
    }


def test_the_drafter_hears_of_a_verdict_first():
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (5, 6)), 0.1)
    assert list(machine.take_outbox()) == ["D0", "T0", "I"]


def test_tokens_are_taken_once_told_once_and_repeated_from_what_the_client_wants():
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0, 1)), 0.0)
    machine.take_outbox()
    machine.receive(verdict(0, (0, 1, 2)), 0.0)
    machine.receive(verdict(0, (0,)), 0.0)
    sent = machine.take_outbox()
    assert sent["T0"] == [Ack("s", Inc(1, 0), P + 3)] * 2
    assert sent["I"] == [new_tokens(2, (2,), (0, 1, 2))]
    machine.receive(Want("s", 1, "I", P + 1), 0.0)
    assert machine.take_outbox()["I"] == [new_tokens(1, (1, 2), (0, 1, 2))]
    machine.receive(Want("s", 1, "I", P + 3), 0.0)
    assert machine.take_outbox()["I"] == [new_tokens(3, (), (0, 1, 2))]


@pytest.mark.parametrize(
    "message",
    [
        verdict(2, (2, 3), whole=(0, 9)),  # another history, and more of it
        verdict(0, (9,)),  # another history, no longer than this one
        verdict(3, (3,)),  # beyond what is known here
    ],
)
def test_a_verdict_that_does_not_fit_opens_the_sequence_anew(message):
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0, 1)), 0.0)
    machine.take_outbox()
    machine.receive(message, 0.0)
    assert machine.take_outbox() == {"T0": [opened(n=1, output=(0, 1))]}
    machine.receive(verdict(0, (9, 9)), 0.0)  # of the inc before
    assert machine.take_outbox() == {}
    machine.receive(verdict(2, (2,), n=1), 0.0)
    assert machine.take_outbox()["I"] == [new_tokens(2, (2,), (0, 1, 2))]
    assert machine.counters.num_reopened == 1


@pytest.mark.parametrize("tokens", [(0, 1), ()])
def test_a_finish_closes_the_workers_and_is_told_until_the_ingress_leaves(tokens):
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0, 1)), 0.0)
    machine.take_outbox()
    machine.receive(verdict(2 - len(tokens), tokens, finish="stop"), 0.0)
    end = End("s", 1, log_of((0, 1)).mark(), "stop")
    closed = [Close("s", Inc(1, 0))]
    assert machine.take_outbox() == {"T0": [Ack("s", Inc(1, 0), P + 2), *closed], "D0": closed, "I": [end]}
    machine.receive(Want("s", 1, "I", P), 0.0)
    machine.receive(verdict(0, (0, 1), finish="stop"), 0.0)
    machine.receive(Resync("T0", "s", Inc(1, 0), 0, "unknown"), 0.0)
    assert machine.take_outbox() == {"I": [new_tokens(0, (0, 1), (0, 1)), end]}
    machine.receive(Cancel("s", 1), 0.0)
    assert (machine.take_outbox(), machine.num_sessions) == ({}, 0)


def test_an_error_is_final_even_where_the_target_has_less_of_the_log():
    """A target that began anew under the same inc, by a late opening, may fail before it is as far as it was."""
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0, 1, 2)), 0.0)
    machine.take_outbox()
    failed = verdict(0, (0,), finish="error")
    machine.receive(Verdict(*(getattr(failed, name) for name in failed.__struct_fields__[:-1]), "its hook"), 0.0)
    assert machine.take_outbox()["I"] == [End("s", 1, log_of((0, 1, 2)).mark(), "error", "its hook")]


def test_an_offer_goes_to_the_target_under_the_targets_inc():
    machine = submitted("T0", "D0")
    machine.receive(verdict(3, (3,)), 0.0)
    machine.take_outbox()
    offer = Offer("s", Inc(1, 0), log_of(()).mark(), (4, 5))
    machine.receive(offer, 0.0)
    machine.receive(Offer("s", Inc(1, 1), log_of(()).mark(), (4, 5)), 0.0)
    assert machine.take_outbox() == {"T0": [Offer("s", Inc(1, 1), offer.mark, (4, 5))]}


def test_a_commit_follows_the_last_and_is_repeated_from_the_mark_of_the_last_offer():
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0, 1)), 0.0)
    machine.receive(verdict(2, (2,)), 0.0)
    machine.receive(Offer("s", Inc(1, 0), log_of((0, 1)).mark(), (4, 5)), 0.0)
    machine.receive(verdict(3, (3,)), 0.0)
    assert machine.take_outbox()["D0"] == [
        commit(0, (0, 1), (0, 1)),
        commit(2, (2,), (0, 1, 2)),
        commit(3, (3,), (0, 1, 2, 3)),
    ]
    machine.step(0.0)
    assert commit(2, (2, 3), (0, 1, 2, 3)) in machine.take_outbox()["D0"]


def test_a_resync_is_answered_for_the_current_inc_only():
    machine = submitted("T0", "D0")
    machine.receive(Resync("T0", "s", Inc(1, 0), 0, "unknown"), 0.0)
    machine.receive(Resync("T0", "s", Inc(1, 0), 0, "unknown"), 0.0)
    machine.receive(Resync("D1", "s", Inc(1, 0), 0, "unknown"), 0.0)
    assert machine.take_outbox() == {"T0": [opened(n=1)]}
    machine.receive(Resync("D0", "s", Inc(1, 0), 0, "gap"), 0.0)
    assert machine.take_outbox() == {"D0": [opened(n=1)]}


def test_live_leaves_out_what_was_just_opened_and_repeats_commits():
    machine = submitted("T0", "D0")
    machine.step(0.5)
    assert machine.take_outbox() == {"T0": [Live("R", (), TIMES.lease_s)], "D0": [Live("R", (), TIMES.lease_s)]}
    machine.receive(verdict(0, (0,)), 1.0)
    machine.take_outbox()
    machine.step(1.0)
    assert machine.take_outbox() == {}
    machine.step(1.5)
    live = Live("R", (("s", Inc(1, 0)),), TIMES.lease_s)
    assert machine.take_outbox() == {"D0": [commit(0, (0,), (0,)), live], "T0": [live]}


def test_what_the_ingress_no_longer_wants_is_closed():
    machine = submitted("T0", "D0")
    machine.receive(Want("s", 1, "I", P), 3.0)
    machine.take_outbox()
    for worker in ("T0", "D0"):
        machine.receive(Alive(worker), 5.0)
    machine.step(TIMES.lease_s + 1)
    assert machine.num_sessions == 1
    machine.take_outbox()
    machine.step(3.0 + TIMES.lease_s + 1)
    closed = Close("s", Inc(1, 0))
    sent = machine.take_outbox()
    assert (sent["T0"][0], sent["D0"][0], machine.num_sessions) == (closed, closed, 0)
    submit(machine, now_s=10.0)  # late
    assert machine.num_sessions == 0
    machine.receive(Want("s", 1, "I", P), 10.0)
    assert machine.take_outbox()["I"] == [Gone("s", 1)]


def test_a_higher_attempt_replaces_the_session_and_closes_its_links():
    machine = submitted("T0", "D0")
    machine.receive(Want("s", 2, "I", P + 1), 0.0)
    assert machine.take_outbox() == {"I": [Gone("s", 2)]}
    submit(machine, attempt=2, output=(0,))
    for messages in machine.take_outbox().values():
        assert messages == [Close("s", Inc(1, 0)), opened(attempt=2, output=(0,))]
    machine.receive(Want("s", 1, "I", P), 0.0)
    machine.receive(Cancel("s", 1), 0.0)
    assert (machine.take_outbox(), machine.num_sessions) == ({}, 1)


def test_a_lost_worker_is_replaced_by_another():
    machine = submitted("T0", "D0")
    join(machine, "T1")
    machine.receive(verdict(0, (0,)), 0.0)
    machine.take_outbox()
    machine.worker_lost("T0", 0.0)
    assert machine.take_outbox() == {"T1": [opened(n=1, output=(0,), suspects="R/1")]}


def test_a_lost_worker_is_replaced_by_the_next_that_comes():
    machine = submitted("T0", "D0")
    machine.worker_lost("T0", 0.0)
    machine.worker_lost("D0", 0.0)
    assert machine.take_outbox() == {}
    join(machine, "T0")
    join(machine, "D7")
    assert machine.take_outbox() == {"T0": [opened(n=1, suspects="R/1")], "D7": [opened(n=1)]}


def test_a_worker_that_is_reached_again_gets_its_openings_again():
    machine = submitted("T0", "D0")
    machine.receive(verdict(0, (0,)), 0.0)
    machine.take_outbox()
    join(machine, "T0")
    assert machine.take_outbox() == {"T0": [opened(output=(0,))]}


def test_a_silent_worker_counts_as_lost_until_it_is_heard_again():
    machine = submitted("T0", plan=Plan(0))
    machine.receive(Alive("T0", {"x": 1.0}), 1.0)
    machine.receive(Want("s", 1, "I", P), 4.0)
    assert machine.worker_metrics() == {"T0": ("target", {"x": 1.0})}
    machine.step(5.5)
    assert machine.worker_metrics() == {}
    assert machine.take_outbox()["T0"] == [Live("R", (), TIMES.lease_s)]  # it is still asked
    submit(machine, "late", now_s=5.5)
    assert machine.take_outbox() == {}
    machine.receive(Alive("T0", {"x": 2.0}), 6.0)
    sent = machine.take_outbox()["T0"]
    assert [(message.seq, message.inc) for message in sent] == [("late", Inc(1, 0)), ("s", Inc(1, 1))]
    assert machine.worker_metrics() == {"T0": ("target", {"x": 2.0})}


def test_a_worker_whose_link_is_alive_is_not_silent_however_long_its_step_takes():
    machine = submitted("T0", plan=Plan(0))
    for now_s in range(1, 20):
        machine.worker_heard("T0", now_s)
        machine.worker_heard("unknown", now_s)
        machine.receive(Want("s", 1, "I", P), now_s)
        machine.step(now_s)
    assert all(isinstance(message, Live) for message in machine.take_outbox()["T0"])
    assert set(machine.worker_metrics()) == {"T0"}


def test_new_times_hold_for_what_is_open_before_the_old_lease_runs_out():
    machine = submitted("T0", plan=Plan(0))
    machine.step(1.0)
    machine.take_outbox()
    machine.set_times(replace(TIMES, lease_s=60.0, renew_interval_s=20.0))
    machine.receive(Want("s", 1, "I", P), 1.0)
    machine.step(1.1)
    assert machine.take_outbox()["T0"] == [Live("R", (("s", Inc(1, 0)),), 60.0)]
    machine.step(20.0)
    assert machine.num_sessions == 1


def test_sequences_move_away_from_a_silent_worker():
    machine = submitted("T0", plan=Plan(0))
    machine.receive(Want("s", 1, "I", P), 4.0)
    join(machine, "T1", 4.0)
    machine.take_outbox()
    machine.step(5.0)
    assert opened(n=1, plan=Plan(0), suspects="R/1") in machine.take_outbox()["T1"]
    machine.receive(Alive("T0"), 5.0)
    assert machine.take_outbox() == {}  # what has moved stays where it is


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
    mark = log_of(()).mark()
    assert sent["I"] == [End("s", 1, mark, "error", "too long")]
    assert sent["T0"] == [Close("s", Inc(1, 0))]
    machine.unsendable(opened(), "too long", 0.0)  # of the drafter's link, too
    assert machine.take_outbox() == {}
    assert machine.num_sessions == 2


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
