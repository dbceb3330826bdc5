"""Deadlines of fixed plans, from what workers report."""

from __future__ import annotations

import pytest

from specdec.control.deadlines import Deadlines
from specdec.protocol.messages import Plan
from specdec.protocol.plans import fixed_plan
from tests.specdec.control.test_controller import spec, steps

FIXED = fixed_plan(4, "overlap", num_branches=4)
PAIR = ("T", "D")


def deadlines_of(num_sequences, *, target_s=0.030, draft_s=0.004, planner=FIXED):
    """Of sequences on one pair, whose workers have reported and answered."""
    controller = Deadlines(planner)
    plans = {f"s{i}": controller.opened(f"s{i}", spec(None)) for i in range(num_sequences)}
    report(controller, num_sequences, target_s, draft_s)
    return controller, plans


def report(controller, num_sequences, target_s, draft_s):
    rows = [num_sequences * n for n in (1, 2, 3, 5)]
    load = {"num_sequences": float(num_sequences)}
    controller.reported("T", "target", steps((n, n, target_s) for n in rows) | load)
    controller.reported("D", "drafter", steps((n, n, draft_s) for n in rows) | load)
    for worker in PAIR:
        controller.echoed(worker, 0.001)


def settled(controller, plans):
    """The first deadline is planned at once."""
    placements = dict.fromkeys(plans, PAIR)
    changed = controller.review(placements, 0.0)
    assert controller.review(placements, 1.0) == {}
    return changed


@pytest.mark.parametrize(
    ("num_sequences", "draft_s", "num_steps"),
    [(1, 0.004, 5), (64, 0.004, 5), (64, 0.007, 3), (64, 0.014, 1), (1, 0.1, 0)],
)
def test_offers_go_when_another_step_would_be_too_late(num_sequences, draft_s, num_steps):
    controller, plans = deadlines_of(num_sequences, draft_s=draft_s)
    assert set(plans.values()) == {Plan(4, 4)}
    changed = settled(controller, plans)
    assert set(changed.values()) == ({Plan(4, 4, num_steps)} if num_steps else set())
    assert not num_steps or changed.keys() == plans.keys()
    assert controller.review(dict.fromkeys(plans, PAIR), 2.0) == {}


def test_a_later_sequence_begins_with_the_newest_deadline():
    controller, plans = deadlines_of(64, draft_s=0.007)
    settled(controller, plans)
    assert controller.opened("new", spec(None)) == Plan(4, 4, 3)
    assert controller.opened("longer", spec(6)) == Plan(6, 4)
    assert controller.opened("none", spec(0)) == Plan()


def test_a_new_pair_takes_no_deadline_away():
    controller, plans = deadlines_of(64, draft_s=0.007)
    settled(controller, plans)
    new = {f"n{i}": controller.opened(f"n{i}", spec(None)) for i in range(64)}
    assert set(new.values()) == {Plan(4, 4, 3)}
    rows = [64 * n for n in (1, 2, 3, 5)]
    controller.reported("D2", "drafter", steps((n, n, 0.007) for n in rows) | {"num_sequences": 64.0})
    controller.echoed("D2", 0.001)
    assert controller.review(dict.fromkeys(new, ("T", "D2")), 2.0) == {}
    assert controller.opened("newer", spec(None)) == Plan(4, 4, 3)


def test_a_deadline_that_comes_out_otherwise_once_is_not_planned():
    controller, plans = deadlines_of(64, draft_s=0.007)
    placements = dict.fromkeys(plans, PAIR)
    settled(controller, plans)
    report(controller, 64, 0.030, 0.014)
    assert controller.review(placements, 2.0) == {}
    report(controller, 64, 0.030, 0.007)
    assert controller.review(placements, 3.0) == {}
    report(controller, 64, 0.030, 0.014)
    assert controller.review(placements, 4.0) == {}
    assert set(controller.review(placements, 5.0).values()) == {Plan(4, 4, 1)}


@pytest.mark.parametrize(
    "planner", [fixed_plan(4, "overlap"), fixed_plan(4, "in_turn", 1.0, 4), fixed_plan(0, "overlap", num_branches=4)]
)
def test_plans_without_branches_are_left_alone(planner):
    controller, plans = deadlines_of(2, planner=planner)
    assert set(plans.values()) == {planner(spec(None))}
    assert settled(controller, plans) == {}


def test_it_needs_both_workers_times():
    controller = Deadlines(FIXED)
    plans = {"s": controller.opened("s", spec(None))}
    assert settled(controller, plans) == {}
    controller, plans = deadlines_of(1)
    controller.lost("D")
    assert settled(controller, plans) == {}
    assert controller.review({"s": ("T", None)}, 2.0) == {}
    controller.closed("s")
    controller.closed("s")
    assert controller.review({"s": PAIR}, 3.0) == {}
