"""Rules 14 and 15: processes that drain, and processes of another model."""

from __future__ import annotations

import pytest

from specdec.core.log import TokenLog
from specdec.core.messages import (
    Alive,
    Close,
    Epoch,
    Gone,
    Live,
    NewTokens,
    Notes,
    Open,
    Plan,
    Resync,
    Submit,
)
from specdec.core.types import Fingerprints
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import DRAINING, MODEL_REPLACED, IngressMachine
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from tests.letters import provenance
from tests.specdec.protocol.scripted import PROMPT
from tests.specdec.protocol.test_faults import FaultyDraft
from tests.specdec.protocol.test_router import PLAN, SPEC, TIMES, join, opened, submit, submitted
from tests.specdec.protocol.test_target import Oracle


def worker(kind, fingerprint=""):
    if kind == "target":
        return TargetMachine("W", Oracle(), TIMES, fingerprint=fingerprint)
    return DrafterMachine("W", FaultyDraft(), TIMES, fingerprint=fingerprint)


def answers(machine):
    return [message for message in machine.take_outbox().get("R", []) if isinstance(message, Resync)]


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_a_worker_without_sequences_tells_its_routers_that_it_drains(kind):
    """Else they would take the end of its link for a death."""
    machine = worker(kind)
    for router in ("R", "S"):
        machine.receive(Live(router, ()), 0.0)
    machine.take_outbox()
    machine.drain(0.0)
    told = machine.take_outbox()
    assert set(told) == {"R", "S"}
    for messages in told.values():
        assert [message.metrics["is_draining"] for message in messages if isinstance(message, Alive)][:1] == [1]
    assert machine.is_drained


def test_a_router_hands_over_what_a_worker_has_that_drains():
    machine = submitted("T0", "D0")
    machine.receive(Alive("T0", {"is_draining": 1.0}), 0.0)
    assert machine.take_outbox() == {}  # there is nobody else yet
    submit(machine, "new")
    assert machine.take_outbox() == {"D0": [opened(seq="new")]}
    join(machine, "T1")
    assert machine.take_outbox() == {
        "T0": [Close("s", Epoch(1, 0))],
        "T1": [opened(seq="new"), opened(n=1)],
    }
    assert machine.counters.num_handed_over == 1


def test_a_group_of_suspects_that_is_refused_goes_elsewhere_together():
    machine = submitted("T0", plan=Plan(0))
    join(machine, "T1")
    machine.worker_lost("T0", 0.0)
    machine.take_outbox()
    machine.receive(Resync("T1", "s", Epoch(1, 1), 0, "draining"), 0.0)
    machine.step(0.0)
    assert machine.take_outbox() == {"T1": [Live("R", (), TIMES.lease_s)]}
    join(machine, "T2")
    assert machine.take_outbox() == {"T2": [opened(n=2, plan=Plan(0), suspects="R/1")]}


def test_where_all_targets_are_of_another_model_sequences_end():
    machine = submitted("T0", plan=Plan(0))
    machine.receive(Resync("T0", "s", Epoch(1, 0), 0, "model"), 0.0)
    machine.step(1.0)
    (end,) = [message for message in machine.take_outbox()["I"] if not isinstance(message, Gone)]
    assert (end.finish, end.reason) == ("error", MODEL_REPLACED)


def test_a_router_refuses_another_model_and_names_its_own_to_workers():
    machine = RouterMachine("R", lambda spec: PLAN, TIMES, fingerprints=Fingerprints("a", "v"))
    join(machine, "T0")
    join(machine, "D0")
    for seq, decision in (("mine", "a"), ("any", ""), ("other", "b")):
        machine.receive(Submit(seq, 1, "I", PROMPT, SPEC, decision), 0.0)
    sent = machine.take_outbox()
    assert sent["I"] == [Gone("other", 1, "model")]
    assert [(message.seq, message.fingerprint) for message in sent["T0"] + sent["D0"]] == [
        *(("mine", "a"), ("any", "a")),
        *(("mine", "v"), ("any", "v")),
    ]
    assert all(isinstance(message, Open) for message in sent["T0"])


def ingress(*routers):
    machine = IngressMachine("I", TIMES, fingerprints=Fingerprints("a", "v"))
    for name in routers:
        machine.router_joined(name, 0.0)
    return machine


def asked(machine):
    """Who was asked last, and under which attempt."""
    ((name, (message,)),) = machine.take_outbox().items()
    assert message.decision == "a"
    return name, message.attempt


def test_an_ingress_asks_no_router_again_that_refuses():
    machine = ingress("R0", "R1")
    machine.start("s", PROMPT, SPEC, 0.0)
    first, attempt = asked(machine)
    machine.receive(Gone("s", attempt, "draining"), 0.0)
    second, attempt = asked(machine)
    assert {first, second} == {"R0", "R1"}
    machine.start("t", PROMPT, SPEC, 0.0)
    assert asked(machine)[0] == second
    machine.receive(Gone("s", attempt, "draining"), 0.0)
    assert machine.take_outbox() == {}  # it waits
    machine.router_joined("R2", 0.0)
    assert asked(machine)[0] == "R2"
    assert machine.take_deliveries() == []


def test_a_request_of_a_model_that_no_router_has_any_more_ends():
    machine = ingress("R0", "R1")
    machine.start("s", PROMPT, SPEC, 0.0)
    machine.receive(Gone("s", asked(machine)[1], "model"), 0.0)
    assert machine.take_deliveries() == []  # there is another router
    draining, attempt = asked(machine)
    machine.receive(Gone("s", attempt, "draining"), 0.0)
    assert machine.take_deliveries() == []  # the next router may be of its model
    machine.router_lost(draining, 0.0)
    (delivery,) = machine.take_deliveries()
    assert (delivery.finish, delivery.reason) == ("error", MODEL_REPLACED)
    assert len(machine) == 0


def test_while_a_router_drains_a_request_waits_for_the_next_one_beside_one_of_another_model():
    machine = ingress("R0", "R1")
    machine.start("s", PROMPT, SPEC, 0.0)
    machine.receive(Gone("s", asked(machine)[1], "model"), 0.0)
    machine.receive(Gone("s", asked(machine)[1], "draining"), 0.0)
    assert machine.take_outbox() == {}
    machine.router_joined("R2", 1.0)
    assert asked(machine)[0] == "R2"
    assert machine.take_deliveries() == []


def test_a_request_ends_when_the_only_router_that_comes_is_of_another_model():
    machine = ingress("R0")
    machine.start("s", PROMPT, SPEC, 0.0)
    machine.receive(Gone("s", asked(machine)[1], "draining"), 0.0)
    assert machine.take_deliveries() == []  # it waits for the next router
    machine.router_refused("R1", 0.0)
    assert machine.take_deliveries() == []
    machine.router_lost("R0", 0.0)
    (delivery,) = machine.take_deliveries()
    assert (delivery.finish, delivery.reason) == ("error", MODEL_REPLACED)
    machine.router_lost("R1", 0.0)
    machine.start("new", PROMPT, SPEC, 0.0)
    assert machine.take_deliveries() == []


def test_a_router_that_drains_sends_away_what_it_has_no_target_for():
    machine = submitted("T0", "D0")
    machine.drain(0.0)
    machine.step(1.0)
    assert "I" not in machine.take_outbox()
    machine.worker_lost("T0", 1.0)
    machine.step(2.0)
    assert machine.take_outbox()["I"] == [Gone("s", 1, "draining")]
    assert machine.is_drained


def test_a_router_that_drains_opens_elsewhere_what_it_can():
    machine = submitted("T0", "D0")
    join(machine, "T1")
    machine.drain(0.0)
    machine.worker_lost("T0", 1.0)
    machine.step(2.0)
    sent = machine.take_outbox()
    assert ("s", Epoch(1, 1)) in [(message.seq, message.epoch) for message in sent["T1"] if isinstance(message, Open)]
    assert "I" not in sent


def test_a_request_whose_lost_end_its_tokens_tell_ends_so_where_the_model_is_gone():
    """Of two requests of a router that is lost the one has all of its tokens, and the other all but one."""
    machine = ingress("R0")
    for seq, num_tokens in (("all", SPEC.max_tokens), ("less", SPEC.max_tokens - 1)):
        machine.start(seq, PROMPT, SPEC, 0.0)
        log = TokenLog((*PROMPT, *range(5, 5 + num_tokens)))
        tokens, notes = log.tail(len(PROMPT)), Notes(provenance("p" * num_tokens), (0,) * num_tokens)
        machine.receive(NewTokens(seq, asked(machine)[1], len(PROMPT), tokens, notes, log.prefix_hash()), 0.0)
    machine.take_deliveries()
    machine.router_lost("R0", 0.0)
    machine.router_joined("R1", 0.0)
    for message in machine.take_outbox()["R1"]:
        machine.receive(Gone(message.seq, message.attempt, "model"), 0.0)
    ends = [(delivery.seq, delivery.finish, delivery.reason) for delivery in machine.take_deliveries()]
    assert ends == [("all", "length", ""), ("less", "error", MODEL_REPLACED)]


def test_an_ingress_that_drains_refuses_requests():
    machine = ingress("R0")
    machine.start("s", PROMPT, SPEC, 0.0)
    machine.drain(0.0)
    machine.start("new", PROMPT, SPEC, 0.0)
    (delivery,) = machine.take_deliveries()
    assert (delivery.seq, delivery.finish, delivery.reason) == ("new", "error", DRAINING)
    assert not machine.is_drained
    machine.cancel("s")
    assert machine.is_drained
    assert machine.metrics()["num_refused_draining"] == 1
