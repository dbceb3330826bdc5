"""What a target may be told while its model works."""

from __future__ import annotations

import pytest

from specdec.protocol.messages import Ack, Plan, PlanUpdate
from specdec.protocol.target import LIGHT
from tests.specdec.protocol.scripted import PROMPT
from tests.specdec.protocol.test_target import INC, TRUE, machine_with, offer, open_message


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_plan_that_comes_during_a_step_holds_from_the_next_one_on(num_tokens):
    machine = machine_with(open_message(plan=Plan(4)), offer((), TRUE[:4]))
    update = PlanUpdate("s", INC, Plan(num_tokens))
    assert isinstance(update, LIGHT)
    verify = machine._backend.verify

    def told_meanwhile(jobs):
        machine.receive(update, 0.0)
        return verify(jobs)

    machine._backend.verify = told_meanwhile
    machine.step(0.0)
    machine.receive(Ack("s", INC, len(PROMPT) + 5), 0.0)
    machine.receive(offer(TRUE[:5], TRUE[5:9]), 0.0)
    machine.step(0.0)
    assert machine._backend.batches == [[("s", TRUE[:4])], [("s", TRUE[5 : 5 + num_tokens])]]
