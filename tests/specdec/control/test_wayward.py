"""Plans that change at any moment, under the random adversary of the protocol's own tests."""

from __future__ import annotations

import itertools

import pytest

from specdec.control.controller import Controller
from specdec.engine.observed import ObservedDrafter, ObservedTarget
from specdec.engine.timing import StepReport
from specdec.protocol.draft_worker import DraftWorkerMachine
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.plans import FixedPlans
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from tests.specdec.protocol.scripted import ViolationError
from tests.specdec.protocol.world import TIMES, World

PART = 20


class Wayward(FixedPlans):
    """Changes its mind at random while times are hostile; later each rise from nothing would count as an opening."""

    def __init__(self, world):
        super().__init__(world._plan)
        self.world = world

    def review(self, placements, now_s):
        rng = self.world.rng
        if not self.world.net.is_hostile:
            return {}
        return {seq: self._planner(None) for seq in placements if rng.random() < 0.3}


class Settling(Controller):
    """The controller, whose plans stay as they are once times are quiet; see :class:`Wayward`."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def review(self, placements, now_s):
        return super().review(placements, now_s) if self.world.net.is_hostile else {}


class ReplannedWorld(World):
    """Odd seeds: plans at random. Even ones: those of the controller, from the times of a clock that makes them up."""

    def _begin(self, name, life):
        super()._begin(name, life)
        node, is_random = self.nodes[name], self.rng.random() < 0.5
        ticks = itertools.accumulate(self.rng.choice((0.01, 0.02, 0.3)) for _ in itertools.count())
        report = StepReport()
        match node.machine:
            case RouterMachine():
                node.machine = RouterMachine(name, Wayward(self) if is_random else Settling(self), TIMES)
            case TargetMachine():
                observed = ObservedTarget(node.backends[0], [report], lambda: round(1e9 * next(ticks)))
                node.machine = TargetMachine(name, observed, TIMES, report.gauges)
            case DraftWorkerMachine():
                drafter, solo = node.backends
                observed = ObservedDrafter(drafter, [report], lambda: round(1e9 * next(ticks)))
                node.machine = DraftWorkerMachine(
                    DrafterMachine(name, observed, TIMES, report.gauges), TargetMachine(name, solo, TIMES)
                )


@pytest.mark.parametrize(
    "start", [*range(0, 60, PART), *(pytest.param(start, marks=pytest.mark.soak) for start in range(60, 120, PART))]
)
def test_no_schedule_of_plans_breaks_a_promise(start):
    accepted = 0
    for seed in range(start, start + PART):
        world = ReplannedWorld(seed)
        try:
            world.run()
        except ViolationError as violation:
            pytest.fail(f"seed {seed}: {violation}")
        accepted += world.counts["accepted"]
    assert accepted > 20
