"""What a worker last reported: step times, room, echoes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.drafting.branches import branch_share
from specdec.drafting.length.plans import WorkerKind
from specdec.drafting.length.step_times import StepTimes, step_times

UNKNOWN_TRIP_S = 0.002
"""To a worker and back, until it is measured."""
_ECHOES_KEPT = 32


@dataclass
class WorkerFigures:
    """What a worker last reported, and the step times that it reported first: those it profiled as it loaded."""

    kind: WorkerKind
    steps: StepTimes = field(default_factory=StepTimes)
    profile: StepTimes = field(default_factory=StepTimes)
    report: Mapping[str, float] = field(default_factory=dict)
    _echoes_s: list[float] = field(default_factory=list)

    def reported(self, report: Mapping[str, float]) -> None:
        """Its newest report has come."""
        self.report = report
        self.steps = step_times(report) or self.steps
        self.profile = self.profile or self.steps

    def echoed(self, seconds: float) -> None:
        """An echo came; a busy drafter answers when its next step has ended, so that a step is taken off."""
        step_s = self.steps.points[-1].seconds if self.kind == "drafter" and self.steps else 0.0
        self._echoes_s = [*self._echoes_s[1 - _ECHOES_KEPT :], seconds - step_s if seconds > step_s else seconds]

    @property
    def round_trip_s(self) -> float:
        """Shortest echo of late, less what the shortest of so many has waited for a running step of a target's."""
        shortest_s = min(self._echoes_s, default=UNKNOWN_TRIP_S)
        step_s = self.steps.points[-1].seconds if self.steps else 0.0
        return max(shortest_s / 2, shortest_s - step_s / (1 + len(self._echoes_s)))

    @property
    def num_sequences(self) -> int:
        """As reported: other routers' are among them."""
        return int(self.report.get("num_sequences", 0))

    @property
    def num_step_tokens(self) -> int:
        """Tokens in a row that a drafter's step gives."""
        return max(1, int(self.report.get("num_step_tokens", 1)))

    def branches_each(self, num_sequences: int) -> int:
        """Most branches that a drafter has room for, of each of its sequences; recurrent states take a slot each."""
        rows, num_slots = max(1, num_sequences, self.num_sequences), int(self.report.get("num_state_slots", 0))
        room = max(0, num_slots // rows - 1) if num_slots else branch_share(rows)
        return min(branch_share(rows), room)
