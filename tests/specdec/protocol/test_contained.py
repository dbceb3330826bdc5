"""A controller that raises: its router goes on, and nothing is drafted."""

from __future__ import annotations

import pytest

from specdec.core.messages import Close, Epoch, Plan
from specdec.protocol.router import RouterMachine
from tests.specdec.protocol.test_replans import Chooser
from tests.specdec.protocol.test_router import PLAN, TIMES, join, opened, submit, verdict


def raises(*_arguments):
    raise ZeroDivisionError("a formula")


@pytest.mark.parametrize("method", ["closed", "decided", "reported", "lost", "review", "metrics"])
def test_an_error_of_the_controller_turns_speculation_off_and_no_more(method):
    chooser = Chooser(PLAN)
    machine = RouterMachine("R", chooser, TIMES)
    controller = machine.planning
    for name in ("T0", "D0"):
        join(machine, name)
    submit(machine)
    assert machine.take_outbox() == {"T0": [opened()], "D0": [opened()]}
    assert machine.metrics()["has_failed_controller"] == 0
    setattr(chooser, method, raises)
    controller.closed("gone")
    controller.reported("T0", "target", {})
    controller.lost("T1")
    machine.receive(verdict(0, (0,)), 0.0)
    for now_s in (0.1, 0.6, 1.2):
        machine.step(now_s)
    assert machine.metrics()["has_failed_controller"] == 1
    machine.step(1.8)
    assert Close("s", Epoch(1, 0)) in machine.take_outbox()["D0"]
    submit(machine, "next", now_s=1.8)
    sent = machine.take_outbox()
    assert (sent["T0"], "D0" in sent) == ([opened(seq="next", plan=Plan(0))], False)
