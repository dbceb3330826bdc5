"""What the controller makes of a target's branch hits and misses."""

from __future__ import annotations

import pytest

from specdec.control.limits import Arm
from tests.specdec.control.test_controller import Service, kept


def guess_rate(service: Service) -> float:
    return service.controller.figures()[""]["estimated_guess_rate"]


class Outcomes(Service):
    """A service whose target reports hits and misses; it drafts for outcomes."""

    def __init__(self) -> None:
        super().__init__(kinds=frozenset({"off", "outcomes"}))
        self.counts = dict.fromkeys(("num_branch_hits", "num_branch_late", "num_branch_misses"), 0.0)
        self.run(kept(0.8), 20.0)
        assert self.group.arm.kind == "outcomes"

    @property
    def group(self):
        return self.controller._groups["T"]

    def report(self, **more: float) -> None:
        self.counts = {name: count + more.get(name, 0.0) for name, count in self.counts.items()}
        self.controller.reported("T", "target", self.target | self.counts)


@pytest.mark.parametrize("name", ["num_branch_hits", "num_branch_late"])
def test_a_guess_that_comes_late_is_right_all_the_same(name: str) -> None:
    service = Outcomes()
    service.report()
    for _ in range(5):
        service.report(**{name: 100.0})
    assert guess_rate(service) > 0.9
    for _ in range(5):
        service.report(num_branch_misses=100.0)
    assert guess_rate(service) < 0.1


def test_what_an_earlier_arm_had_is_not_the_present_ones() -> None:
    service = Outcomes()
    service.report()
    before = guess_rate(service)
    service.group.arm = Arm("outcomes", 2, 4)
    service.report(num_branch_misses=100.0)
    assert guess_rate(service) == before
    service.report(num_branch_misses=100.0)
    assert guess_rate(service) < before
