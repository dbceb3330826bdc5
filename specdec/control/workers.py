"""What workers last reported: step times, room, echoes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.control.steptimes import StepTimes, step_times
from specdec.control.ways import Conditions
from specdec.protocol.branches import branch_share
from specdec.protocol.plans import WorkerKind

_ECHOES_KEPT = 32
_ONE_TRIP_S = 0.002
"""To a worker and back, until it is measured."""
_FULL_CACHE, _ROOM_AGAIN = 0.95, 0.8
"""Usage from which a cache is full, and below which it no longer is: branches make up a part of it themselves."""


@dataclass
class WorkerFigures:
    """What a worker last reported.

    Attributes:
        is_full: Whether its cache was full, and has not become much emptier since.
    """

    kind: WorkerKind
    steps: StepTimes = field(default_factory=StepTimes)
    report: Mapping[str, float] = field(default_factory=dict)
    echoes_s: list[float] = field(default_factory=list)
    is_full: bool = False

    def reported(self, report: Mapping[str, float]) -> None:
        """Its newest report has come."""
        self.report = report
        self.steps = step_times(report) or self.steps
        self.is_full = report.get("kv_cache_usage_perc", 0.0) >= (_ROOM_AGAIN if self.is_full else _FULL_CACHE)

    def branches_each(self, num_sequences: int) -> int:
        """Most branches that a drafter has room for, of each of its sequences; recurrent states take a slot each."""
        if self.is_full:
            return 0
        rows = max(1, num_sequences, self.num_sequences)
        share, num_slots = branch_share(rows), int(self.report.get("num_state_slots", 0))
        return min(share, max(0, num_slots // rows - 1)) if num_slots else share

    @property
    def num_sequences(self) -> int:
        """As reported."""
        return int(self.report.get("num_sequences", 0))

    @property
    def num_drafted_for(self) -> int:
        """Of these, on a drafter, those that it drafts for: not requests for its own model."""
        return self.num_sequences - int(self.report.get("num_solo_sequences", 0))

    def echoed(self, seconds: float) -> None:
        """An echo came. A busy target answers as its next step begins, a busy drafter when its next step has ended.

        So what took longer than a step is taken for that on a drafter. On a target it may be the way alone.
        """
        step_s = self._step_s() if self.kind == "drafter" else 0.0
        self.echoes_s = [*self.echoes_s[1 - _ECHOES_KEPT :], seconds - step_s if seconds > step_s else seconds]

    def _step_s(self) -> float:
        """A target's shortest step, with a token per sequence; a drafter's newest, as branches make each one longer."""
        if not self.steps:
            return 0.0
        rows = max(1, self.num_sequences)
        return self.steps.at(rows, rows) if self.kind == "target" else self.steps.points[-1].seconds

    @property
    def round_trip_s(self) -> float | None:
        """Shortest echo of late, less what the shortest of so many waited for a running step; None without any."""
        if not self.echoes_s:
            return None
        shortest_s = min(self.echoes_s)
        return max(shortest_s / 2, shortest_s - self._step_s() / (1 + len(self.echoes_s)))


def conditions_of(
    target: WorkerFigures,
    drafter: WorkerFigures,
    num_rows: int,
    num_draft_rows: int,
    guess_rate: float,
) -> Conditions | None:
    """What a target and a drafter have reported, as what a choice depends on; None while either has no step times.

    Args:
        target: Of the pair.
        drafter: Of the pair.
        num_rows: Sequences that are known to be on the target; it may report more.
        num_draft_rows: Sequences that the drafter drafts for.
        guess_rate: Of the draft's guesses.
    """
    if not target.steps or not drafter.steps:
        return None
    trips = [target.round_trip_s, drafter.round_trip_s]
    return Conditions(
        target=target.steps,
        draft=drafter.steps,
        num_rows=max(num_rows, target.num_sequences),
        num_draft_rows=max(1, num_draft_rows),
        round_trip_s=sum(_ONE_TRIP_S if trip is None else trip for trip in trips),
        guess_rate=guess_rate,
    )
