"""Log lines of routers and workers that concern a sequence name it, and the client's request."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest

from specdec.core.messages import Alive, Epoch, Plan, Resync, Submit
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import label, labels
from specdec.protocol.target import TargetMachine
from tests.specdec.protocol.scripted import PROMPT
from tests.specdec.protocol.test_faults import Faulty, FaultyDraft
from tests.specdec.protocol.test_router import SPEC, join, router
from tests.specdec.protocol.test_target import TIMES, open_message

NAMED = "s (request client-7)"
ASKED = dataclasses.replace(SPEC, request_id="client-7")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    caplog.set_level(logging.INFO, "specdec")
    found: list[str] = []
    yield found
    found += [record.getMessage() for record in caplog.get_records("call")]
    assert found
    assert all(NAMED in line for line in found), found


@pytest.mark.parametrize("fault", ["poison", "failing"])
def test_a_targets_lines(lines: list[str], fault: str) -> None:
    machine = TargetMachine("T", Faulty(**{fault: "s"}), TIMES)
    machine.receive(open_message(plan=Plan(0), request_id="client-7"), 0.0)
    for _ in range(3):
        machine.step(0.0)
    assert machine.metrics()["num_errors"] == 1


@pytest.mark.parametrize("fault", ["poison", "failing"])
def test_a_drafters_lines(lines: list[str], fault: str) -> None:
    machine = DrafterMachine("D", FaultyDraft(**{fault: "s"}), TIMES)
    machine.receive(open_message(plan=Plan(3, 2), request_id="client-7"), 0.0)
    for _ in range(3):
        machine.step(0.0)
    assert machine.metrics()["num_skipped_sequences"] == 1


def test_a_routers_lines(lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    machine = router("T0")
    machine.receive(Submit("s", 1, "I", PROMPT, ASKED), 0.0)
    machine.receive(Resync("T0", "s", Epoch(1, 0), 0, "unknown"), 0.0)
    machine.receive(Resync("T0", "s", Epoch(1, 1), 0, "draining"), 0.0)
    for i in range(1, 9):
        join(machine, f"T{i}")
        machine.receive(Alive(f"T{i}", {"num_sequences": 1}), 0.0)
        machine.worker_lost(f"T{i}", 0.0)
    said = [record.getMessage().replace(NAMED, "S") for record in caplog.get_records("call")]
    assert said[:3] == [
        "The sequence S is opened again on T0: unknown",
        "The sequence S was refused by T0: draining",
        "Lost the worker T1; opening its sequences elsewhere: S",
    ]
    assert said[-1].startswith("The sequence S ends with an error: ")


def test_an_ingress_lines(lines: list[str]) -> None:
    machine = IngressMachine("I", TIMES)
    machine.router_joined("R0", 0.0)
    machine.start("s", PROMPT, ASKED, 0.0)
    machine.router_lost("R0", 0.0)


def test_of_many_the_first_are_named() -> None:
    sequences = [TargetMachine("T", Faulty(), TIMES)._new_sequence(open_message(seq=f"s{i}"), 0.0) for i in range(20)]
    assert label(sequences[3]) == "s3"
    assert labels(sequences[:2]) == "s0, s1"
    assert labels(sequences).endswith(", s15 and 4 more")
