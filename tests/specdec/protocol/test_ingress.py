from __future__ import annotations

from specdec.core.messages import End, NewTokens, Notes, Submit, Want
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.protocol.ingress import IngressMachine, TokenDelta
from specdec.protocol.leases import Times
from tests.letters import provenance
from tests.specdec.protocol.scripted import PROMPT, log_of

TIMES = Times(renew_interval_s=1.0, retry_interval_s=0.5, peer_timeout_s=4.0)
SPEC = SequenceSpec(SamplingParams(), 0, len(PROMPT), 12)
P = len(PROMPT)


def ingress(*routers):
    machine = IngressMachine("I", TIMES)
    for name in routers:
        machine.router_joined(name, 0.0)
    machine.start("s", PROMPT, SPEC, 0.0)
    return machine


def submitted():
    """An ingress with one request, submitted to its only router."""
    machine = ingress("R")
    machine.take_outbox()
    return machine


def submission(attempt=1, output=()):
    return Submit("s", attempt, "I", SharedTokens(PROMPT), SPEC, output=output)


def new_tokens(base, tokens, whole, attempt=1):
    notes = Notes(provenance("p" * len(tokens)), (0,) * len(tokens))
    return NewTokens("s", attempt, P + base, tuple(tokens), notes, log_of(whole).prefix_hash())


def delivered(*tokens):
    return TokenDelta(tokens, Notes(provenance("p" * len(tokens)), (0,) * len(tokens)))


def test_it_wants_and_acknowledges_as_time_goes_by():
    machine = submitted()
    machine.step(0.9)
    machine.receive(new_tokens(0, (3,), (3,)), 0.4)
    assert machine.take_outbox() == {}
    machine.receive(new_tokens(0, (3, 4), (3, 4)), 0.5)
    assert machine.take_outbox() == {"R": [Want("s", 1, "I", P + 2)]}
    machine.step(1.4)
    assert machine.take_outbox() == {}
    machine.step(1.5)
    assert machine.take_outbox() == {"R": [Want("s", 1, "I", P + 2)]}


def test_a_router_that_answers_is_not_silent():
    machine = submitted()
    machine.receive(new_tokens(0, (), ()), 3.0)
    machine.step(TIMES.peer_timeout_s + 1)
    assert machine.take_outbox() == {"R": [Want("s", 1, "I", P)]}


def test_only_the_lost_routers_requests_are_submitted_again():
    machine = ingress("R", "Q")
    for seq in "tuv":
        machine.start(seq, PROMPT, SPEC, 0.0)
    home = {message.seq: router for router, messages in machine.take_outbox().items() for message in messages}
    assert set(home.values()) == {"R", "Q"}, "none holds over two more than the other"
    machine.router_lost(home["s"], 1.0)
    ((other, messages),) = machine.take_outbox().items()
    assert other != home["s"]
    assert {message.seq for message in messages} == {seq for seq, router in home.items() if router == home["s"]}


def test_requests_that_have_ended_count_for_no_router():
    """Prompts that begin alike have one router, for as long as it holds at most two more than the other."""
    machine, prompt = IngressMachine("I", TIMES), tuple(range(100))
    for name in ("R", "Q"):
        machine.router_joined(name, 0.0)
    chosen = set()
    for i in range(20):
        machine.start(str(i), prompt, SPEC, 0.0)
        chosen |= {name for name, sent in machine.take_outbox().items() if isinstance(sent[-1], Submit)}
        machine.cancel(str(i))
    assert len(chosen) == 1


def test_a_router_that_joined_twice_is_lost_at_once():
    machine = ingress("R", "R")
    machine.take_outbox()
    machine.router_lost("R", 1.0)
    assert machine.take_outbox() == {}


def test_without_a_router_it_waits_for_one():
    machine = ingress()
    machine.step(10.0)
    assert machine.take_outbox() == {}
    machine.router_joined("R", 20.0)
    (submit,) = machine.take_outbox()["R"]
    machine.router_lost("R", 20.0)
    machine.router_joined("R", 21.0)
    (again,) = machine.take_outbox()["R"]
    assert again.attempt > submit.attempt
    machine.router_joined("R", 22.0)
    assert machine.take_outbox() == {}


def test_an_end_before_what_the_client_has_is_of_another_life_of_the_router():
    """A request that its router submitted again under the same attempt may fail sooner than it did before."""
    machine = submitted()
    machine.receive(new_tokens(0, (3, 4), (3, 4)), 0.0)
    machine.take_outbox()
    machine.receive(End("s", 1, log_of((3,)).prefix_hash(), "error", "it fails"), 1.0)
    assert machine.take_outbox() == {"R": [submission(2, (3, 4))]}


def test_a_request_that_is_too_long_to_be_submitted_ends_with_an_error_and_no_other_does():
    machine = ingress("R")
    machine.start("other", PROMPT, SPEC, 0.0)
    machine.unsendable(submission(attempt=0), "of an older attempt", 0.0)
    assert machine.take_deliveries() == []
    machine.unsendable(submission(), "too long", 0.0)
    assert machine.take_deliveries() == [TokenDelta(finish="error", reason="too long")]
    assert len(machine) == 1
