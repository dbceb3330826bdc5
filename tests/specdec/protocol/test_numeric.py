"""Rule 17: a strict sequence goes on only on a target whose logits have the same hash, or ends."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from specdec.core.messages import (
    Ack,
    Alive,
    Close,
    End,
    Epoch,
    Live,
    NewTokens,
    Open,
    Plan,
    Resync,
    Submit,
    Want,
)
from specdec.protocol.ingress import NUMERIC_CONTRACT, IngressMachine
from specdec.protocol.target import TargetMachine
from tests.specdec.protocol.scripted import PROMPT
from tests.specdec.protocol.test_router import SPEC, TIMES, P, join, new_tokens, submit, submitted, verdict
from tests.specdec.protocol.test_target import Oracle, open_message


def refusals(machine):
    return [message.why for message in machine.take_outbox().get("R", []) if isinstance(message, Resync)]


def test_a_target_refuses_what_has_begun_with_another_hash_and_names_its_own():
    for own, begun, expected in (
        ("a", "b", ["numeric"]),
        ("", "b", ["numeric"]),
        *((own, own, []) for own in ("a", "")),
    ):
        machine = TargetMachine("W", Oracle(), TIMES, numeric=own)
        machine.receive(replace(open_message(), numeric=begun), 0.0)
        assert refusals(machine) == expected
        if not expected:
            machine.step(0.0)
            assert [message.numeric for message in machine.take_outbox()["R"]] == [own]
        machine.receive(Live("R", ()), 0.0)
        machine.drain(0.0)
        assert [message.numeric for message in machine.take_outbox()["R"]] == [own, own]


def begun(numeric="a", **options):
    """A router with a sequence that T0 has given two tokens, and another target."""
    machine = submitted("T0", plan=Plan(0), **options)
    join(machine, "T1")
    machine.receive(replace(verdict(0, (0, 1)), numeric=numeric), 0.0)
    return machine


def test_the_hash_goes_to_the_ingress_and_to_the_next_target():
    machine = begun()
    (told,) = (message for message in machine.take_outbox()["I"] if isinstance(message, NewTokens))
    assert told.numeric == "a"
    machine.worker_lost("T0", 0.0)
    machine.step(0.0)
    (opened,) = (message for message in machine.take_outbox()["T1"] if isinstance(message, Open))
    assert (opened.numeric, opened.output) == ("a", (0, 1))


def test_a_sequence_passes_targets_with_another_hash():
    machine = begun()
    join(machine, "T2")
    machine.worker_lost("T0", 0.0)
    machine.step(0.0)
    sent = machine.take_outbox()
    (first,) = (name for name in ("T1", "T2") if any(isinstance(message, Open) for message in sent.get(name, ())))
    (second,) = {"T1", "T2"} - {first}
    machine.receive(Resync(first, "s", Epoch(1, 1), 0, "numeric"), 0.0)
    machine.step(0.0)
    sent = machine.take_outbox()
    assert [message.numeric for message in sent[second] if isinstance(message, Open)] == ["a"]
    assert not any(isinstance(message, (End, Open)) for message in (*sent.get("I", ()), *sent.get(first, ())))


def test_a_sequence_ends_if_no_target_has_its_hash():
    machine = begun()
    machine.worker_lost("T0", 0.0)
    machine.step(0.0)
    machine.take_outbox()
    machine.receive(Resync("T1", "s", Epoch(1, 1), 0, "numeric"), 0.0)
    machine.step(1.0)
    (end,) = (message for message in machine.take_outbox()["I"] if isinstance(message, End))
    assert (end.finish, end.reason) == ("error", NUMERIC_CONTRACT)


def test_a_fast_request_goes_on_with_any_hash():
    router = begun(spec=dataclasses.replace(SPEC, keeps_numeric=False))
    sent = router.take_outbox()
    assert [message.numeric for message in sent["I"] if isinstance(message, NewTokens)] == [""]
    router.receive(Alive("T0", {"is_draining": 1.0}), 0.0)
    router.step(0.0)
    (opened,) = (message for message in router.take_outbox()["T1"] if isinstance(message, Open))
    assert opened.numeric == "", "it waits for no equal hash, and no target refuses it"


def draining(**options):
    """One whose target drains."""
    machine = begun(**options)
    machine.receive(Alive("T0", {"is_draining": 1.0}), 0.0)
    machine.step(0.0)
    return machine


def told(machine, worker, numeric):
    """A target without sequences has named its hash."""
    machine.receive(Alive(worker, numeric=numeric), 0.0)
    machine.step(2.0)


@pytest.mark.parametrize("of_next", ["", "b"])
def test_a_draining_target_finishes_a_strict_sequence_if_no_other_is_known_to_have_its_bits(of_next):
    machine = draining()
    if of_next:
        told(machine, "T1", of_next)
    sent = machine.take_outbox()
    assert not any(isinstance(message, Close) for message in sent.get("T0", ()))
    assert not any(isinstance(message, Open) for message in sent.get("T1", ()))
    machine.receive(verdict(2, (2,), finish="length"), 3.0)
    (end,) = (message for message in machine.take_outbox()["I"] if isinstance(message, End))
    assert (end.seq, end.finish) == ("s", "length")
    assert machine.counters.num_handed_over == 0


def test_a_draining_target_hands_a_strict_sequence_to_one_with_its_hash():
    machine = draining()
    submit(machine, "u")
    join(machine, "T2")  # it is loaded less than T1, and nothing is known of it
    told(machine, "T1", "a")
    sent = machine.take_outbox()
    assert Close("s", Epoch(1, 0)) in sent["T0"]
    assert [message.numeric for message in sent["T1"] if isinstance(message, Open) and message.seq == "s"] == ["a"]


def test_a_sequence_without_a_hash_is_handed_over_at_once():
    sent = draining(numeric="").take_outbox()
    assert Close("s", Epoch(1, 0)) in sent["T0"]
    assert [message.seq for message in sent["T1"] if isinstance(message, Open)] == ["s"]


def test_a_sequence_whose_draining_target_is_gone_ends_if_no_target_has_its_hash():
    machine = draining()
    machine.worker_lost("T0", 0.0)
    machine.step(0.0)
    machine.receive(Resync("T1", "s", Epoch(1, 1), 0, "numeric"), 0.0)
    machine.step(1.0)
    (end,) = (message for message in machine.take_outbox()["I"] if isinstance(message, End))
    assert (end.finish, end.reason) == ("error", NUMERIC_CONTRACT)


def test_it_is_named_until_something_is_acknowledged():
    target = TargetMachine("W", Oracle(), TIMES, numeric="a")
    target.receive(open_message(), 0.0)
    router = submitted("T0", plan=Plan(0))
    router.receive(replace(verdict(0, (0, 1)), numeric="a"), 0.0)
    router.receive(Want("s", 1, "I", P + 2), 0.0)
    router.take_outbox()
    router.receive(verdict(2, (2,)), 0.0)
    said = [message.numeric for message in router.take_outbox()["I"] if isinstance(message, NewTokens)]
    for _ in range(2):
        target.step(0.0)
        (told,) = target.take_outbox()["R"]
        said.append(told.numeric)
        target.receive(Ack("s", told.epoch, told.prefix_hash.length), 0.0)
    assert said == ["", "a", ""]


def test_it_waits_where_there_is_no_target_at_all():
    machine = begun()
    machine.worker_lost("T1", 0.0)
    machine.worker_lost("T0", 0.0)
    machine.step(0.0)
    assert not any(isinstance(message, End) for message in machine.take_outbox()["I"])
    join(machine, "T2")
    machine.step(0.0)
    assert [message.numeric for message in machine.take_outbox()["T2"] if isinstance(message, Open)] == ["a"]


def test_a_sequence_without_a_hash_goes_on_anywhere():
    machine = begun(numeric="")
    machine.worker_lost("T0", 0.0)
    machine.step(0.0)
    assert [message.numeric for message in machine.take_outbox()["T1"] if isinstance(message, Open)] == [""]


def test_an_ingress_submits_again_with_the_hash():
    machine = IngressMachine("I", TIMES)
    for name in ("R0", "R1"):
        machine.router_joined(name, 0.0)
    machine.start("s", PROMPT, SPEC, 0.0)
    ((first, _),) = machine.take_outbox().items()
    machine.receive(replace(new_tokens(0, (0, 1), (0, 1)), numeric="a"), 0.0)
    machine.take_outbox()
    machine.router_lost(first, 0.0)
    ((_, (again,)),) = machine.take_outbox().items()
    assert isinstance(again, Submit)
    assert (again.numeric, again.output, len(again.prompt)) == ("a", (0, 1), P)
