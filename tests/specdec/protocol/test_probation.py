"""Rule 16 at the router: who was on a target that died is opened again apart from others, and who is at fault ends."""

from __future__ import annotations

import pytest

from specdec.core.messages import Alive, Cancel, End, Epoch, Notes, Open, Plan, Verdict
from tests.letters import provenance
from tests.specdec.protocol.scripted import log_of
from tests.specdec.protocol.test_router import P, join, router, submit

NO_DRAFTS = Plan(0)


def machine_with(count, *workers):
    machine = router(*workers, plan=NO_DRAFTS)
    for i in range(count):
        submit(machine, f"{i:02d}")
    machine.take_outbox()
    return machine


def opens(machine):
    """Names of what is opened on each worker."""
    sent = machine.take_outbox()
    found = {
        peer: [message.seq for message in messages if isinstance(message, Open)] for peer, messages in sent.items()
    }
    return {peer: names for peer, names in found.items() if names}


def session(machine, seq):
    return next(one for one in machine._sessions if one.seq == seq)


def decide(machine, seq, tokens=(5,), finish=None):
    one = session(machine, seq)
    log = log_of(one.log.tokens[P:])
    log.extend(tokens)
    base = len(one.log)
    notes = Notes(provenance("p" * len(tokens)), (0,) * len(tokens))
    epoch = Epoch(one.epoch.attempt, one.target.n)
    machine.receive(Verdict(seq, epoch, base, tuple(tokens), notes, log.prefix_hash(), finish), 0.0)
    machine.step(0.0)


def announce(machine, seq):
    decide(machine, seq, ())


def errors(machine):
    return [message.seq for message in machine.take_outbox().get("I", []) if isinstance(message, End)]


def test_every_target_tries_a_group_of_its_own():
    machine = machine_with(4, "T0")
    join(machine, "T1")
    join(machine, "T2")
    machine.worker_lost("T0", 0.0)
    assert opens(machine) == {"T1": ["00"], "T2": ["01"]}
    submit(machine, "new")
    assert opens(machine) == {"T1": ["new"]}  # who is not suspected does not wait


def test_more_than_sixteen_are_tried_in_halves():
    machine = machine_with(20, "T0")
    join(machine, "T1")
    machine.worker_lost("T0", 0.0)
    half = [f"{i:02d}" for i in range(10)]
    assert opens(machine) == {"T1": half}
    for seq in half[:9]:
        decide(machine, seq)
    assert opens(machine) == {}
    decide(machine, half[9])
    assert len(opens(machine)["T1"]) == 10


def test_whose_step_was_not_announced_is_opened_again_a_bounded_number_of_times():
    """Another router's sequence may have been at fault; or the word was lost with the worker."""
    machine = machine_with(1, "T0")
    for life in range(4):
        join(machine, f"T{life + 1}")
        machine.receive(Alive(f"T{life}", {"num_sequences": 2.0}), 0.0)
        machine.worker_lost(f"T{life}", 0.0)
        assert opens(machine) == {f"T{life + 1}": ["00"]}
    join(machine, "T5")
    machine.worker_lost("T4", 0.0)
    assert session(machine, "00").finish == "error"


def test_deaths_that_were_shared_do_not_count():
    machine = machine_with(2, "T0")
    for life in range(10):
        join(machine, f"T{life + 1}")
        machine.worker_lost(f"T{life}", 0.0)
        for seq in ("00", "01"):
            assert opens(machine) == {f"T{life + 1}": [seq]}
            decide(machine, seq)
    assert [one.finish for one in machine._sessions] == [None, None]


def test_deaths_far_apart_do_not_count():
    machine = machine_with(1, "T0")
    for life in range(10):
        join(machine, f"T{life + 1}")
        machine.worker_lost(f"T{life}", 0.0)
        assert opens(machine) == {f"T{life + 1}": ["00"]}
        announce(machine, "00")
        decide(machine, "00", (5,) * 64)
    assert session(machine, "00").finish is None


@pytest.mark.parametrize("how", ["cancel", "finish", "error"])
def test_a_suspect_that_is_gone_makes_room_for_the_next(how):
    machine = machine_with(2, "T0")
    join(machine, "T1")
    machine.worker_lost("T0", 0.0)
    machine.take_outbox()
    if how == "cancel":
        machine.receive(Cancel("00", 1), 0.0)
        machine.step(0.0)
    else:
        decide(machine, "00", (), "stop" if how == "finish" else "error")
    assert opens(machine) == {"T1": ["01"]}
