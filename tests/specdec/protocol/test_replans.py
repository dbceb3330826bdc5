from __future__ import annotations

from specdec.core.messages import Alive, Close, Epoch, Offer, Plan, PlanUpdate, Resync
from specdec.drafting.plans import PlanController
from specdec.protocol.router import RouterMachine
from tests.letters import spelled
from tests.specdec.protocol.scripted import log_of
from tests.specdec.protocol.test_router import PLAN, TIMES, join, opened, submit, verdict


class Chooser(PlanController):
    """A controller that says what a test wants, and keeps what it is told."""

    def __init__(self, plan):
        super().__init__(lambda spec: plan)
        self.changes, self.placements, self.calls = {}, {}, []

    def closed(self, seq):
        self.calls.append(("closed", seq))

    def decided(self, seq, notes, now_s):
        self.calls.append(("decided", seq, spelled(notes)))

    def reported(self, worker, kind, report):
        self.calls.append(("reported", worker, kind, report))

    def lost(self, worker):
        self.calls.append(("lost", worker))

    def review(self, placements, now_s):
        self.placements, changes, self.changes = dict(placements), self.changes, {}
        return changes


def chosen(plan, *workers, **options):
    chooser = Chooser(plan)
    machine = RouterMachine("R", chooser, TIMES, **options)
    for name in workers:
        join(machine, name)
    submit(machine)
    machine.take_outbox()
    return machine, chooser


def updates(messages):
    return [message for message in messages if isinstance(message, PlanUpdate)]


def test_a_change_of_plan_goes_to_both_workers():
    machine, chooser = chosen(PLAN, "T0", "D0")
    chooser.changes = {"s": Plan(5), "unknown": Plan(5)}
    machine.step(0.0)
    sent = machine.take_outbox()
    assert chooser.placements == {"s": ("T0", "D0")}
    assert updates(sent["T0"]) == updates(sent["D0"]) == [PlanUpdate("s", Epoch(1, 0), Plan(5))]


def test_a_plan_that_falls_to_nothing_leaves_the_drafter_and_one_that_rises_comes_back_under_a_new_n():
    machine, chooser = chosen(PLAN, "T0", "D0")
    chooser.changes = {"s": Plan()}
    machine.step(0.0)
    sent = machine.take_outbox()
    assert updates(sent["T0"]) == [PlanUpdate("s", Epoch(1, 0), Plan())]
    assert sent["D0"][0] == Close("s", Epoch(1, 0))
    machine.receive(verdict(0, (0,)), 0.1)
    assert set(machine.take_outbox()) == {"T0", "I"}
    machine.step(0.1)
    machine.step(0.3)
    assert chooser.placements == {"s": ("T0", None)}
    chooser.changes = {"s": Plan(2)}
    machine.step(0.8)
    sent = machine.take_outbox()
    assert updates(sent["T0"]) == [PlanUpdate("s", Epoch(1, 0), Plan(2))]
    assert sent["D0"] == [opened(n=1, output=(0,), plan=Plan(2))]
    machine.receive(Offer("s", Epoch(1, 0), log_of(()).prefix_hash(), (4, 5)), 0.9)  # of the time before
    assert machine.take_outbox() == {}


def test_a_plan_is_repeated_as_long_as_it_is_not_that_of_the_opening():
    machine, chooser = chosen(PLAN, "T0", "D0")
    machine.step(0.0)
    chooser.changes = {"s": Plan(5)}
    machine.step(0.6)
    machine.take_outbox()
    for now_s in (1.6, 2.7):
        machine.step(now_s)
        assert updates(machine.take_outbox()["T0"]) == [PlanUpdate("s", Epoch(1, 0), Plan(5))]
    machine.receive(Resync("T0", "s", Epoch(1, 0), 0, "unknown"), 2.7)
    assert machine.take_outbox()["T0"] == [opened(n=1, plan=Plan(5))]
    machine.step(3.8)
    sent = machine.take_outbox()
    assert updates(sent["T0"]) == []
    assert updates(sent["D0"]) == [PlanUpdate("s", Epoch(1, 0), Plan(5))]


def test_a_plan_that_is_again_that_of_the_opening_is_repeated_too():
    machine, chooser = chosen(PLAN, "T0", "D0")
    machine.step(0.0)
    for now_s, plan in ((0.5, Plan(5)), (1.0, PLAN)):
        chooser.changes = {"s": plan}
        machine.step(now_s)
    machine.take_outbox()
    machine.step(2.0)
    sent = machine.take_outbox()
    assert updates(sent["T0"]) == updates(sent["D0"]) == [PlanUpdate("s", Epoch(1, 0), PLAN)]


def test_a_worker_that_is_reached_again_is_told_the_plan_besides_the_opening():
    machine, chooser = chosen(PLAN, "T0", "D0")
    machine.step(0.0)
    chooser.changes = {"s": Plan(5)}
    machine.step(0.6)
    machine.take_outbox()
    join(machine, "T0", 0.7)  # it may have kept the sequence, and then ignores the opening
    assert machine.take_outbox()["T0"] == [opened(plan=Plan(5))]
    machine.step(1.8)
    assert updates(machine.take_outbox()["T0"]) == [PlanUpdate("s", Epoch(1, 0), Plan(5))]


def test_without_a_drafter_a_plan_that_rises_waits_for_one():
    machine, chooser = chosen(Plan(), "T0")
    chooser.changes = {"s": Plan(2)}
    machine.step(0.0)
    assert set(machine.take_outbox()) == {"T0"}
    join(machine, "D0", 1.0)
    assert machine.take_outbox() == {"D0": [opened(plan=Plan(2))]}


def test_the_controller_learns_what_comes():
    machine, chooser = chosen(PLAN, "T0", "D0")
    machine.step(0.0)
    machine.receive(verdict(0, (0, 1)), 0.1)
    machine.receive(verdict(0, (0, 1)), 0.1)
    machine.step(0.1)
    machine.step(0.2)
    machine.receive(Alive("D0", {"x": 1.0}), 0.25)
    machine.receive(Alive("D0", {"x": 2.0}), 0.5)
    machine.worker_lost("D0", 0.5)
    machine.receive(verdict(2, (2,), finish="stop"), 0.6)
    assert chooser.calls == [
        ("decided", "s", "pp"),
        ("decided", "s", ""),
        ("reported", "D0", "drafter", {"x": 1.0}),
        ("reported", "D0", "drafter", {"x": 2.0}),
        ("lost", "D0"),
        ("decided", "s", "p"),
        ("closed", "s"),
    ]
    chooser.changes = {"s": Plan(7)}
    machine.take_outbox()
    machine.step(0.7)
    assert (chooser.placements, machine.take_outbox()) == ({}, {})


def test_another_planner_plans_open_sequences_anew():
    machine, chooser = chosen(PLAN, "T0", "D0")
    machine.set_planner(lambda spec: Plan(5), 0.0)
    sent = machine.take_outbox()
    assert updates(sent["T0"]) == updates(sent["D0"]) == [PlanUpdate("s", Epoch(1, 0), Plan(5))]
    chooser.calls.clear()
    machine.worker_lost("D0", 0.0)
    assert chooser.calls == [], "the old one is told nothing any more"
