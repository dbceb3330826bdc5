"""Who plans: the border between the router and its controller, and the plainest controllers there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from specdec.core.messages import Notes, Plan
from specdec.core.params import SequenceSpec
from specdec.core.types import SpeculationMode

WorkerKind = Literal["target", "drafter"]
Planner = Callable[[SequenceSpec], Plan]
SEQUENTIAL_WAIT_S = 1.0
"""Longest wait of a target for a draft in mode ``sequential``; a drafter that is gone costs this once per sequence."""
Placements = Mapping[str, tuple[str, str | None]]
"""Target and drafter of each sequence that has a target."""


class PlanController(Protocol):
    """Chooses plans from what the router tells it. No clock, no messages of its own."""

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """A sequence has come; its first plan."""
        ...

    def closed(self, seq: str) -> None:
        """A sequence has ended; unknown ones are ignored."""
        ...

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """New tokens of a sequence have come."""
        ...

    def reported(self, worker: str, kind: WorkerKind, report: Mapping[str, float]) -> None:
        """A worker's newest counters and gauges have come."""
        ...

    def echoed(self, worker: str, seconds: float) -> None:
        """A worker has answered a renewal, so long after it was sent."""
        ...

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        ...

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """Choose anew; gives the plans that have changed, by sequence. Called a few times a second."""
        ...

    def figures(self) -> dict[str, float]:
        """Choices and estimates by name; what belongs to one target, or one mode, is named ``name/<target>``."""
        ...


class FixedPlans:
    """A controller whose plans are its planner's, and nothing else.

    Args:
        planner: Gives each sequence its plan.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """The sequence's plan."""
        return self._planner(spec)

    def closed(self, seq: str) -> None:
        """Nothing to forget."""

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """Nothing to learn."""

    def reported(self, worker: str, kind: WorkerKind, report: Mapping[str, float]) -> None:
        """Nothing to learn."""

    def echoed(self, worker: str, seconds: float) -> None:
        """Nothing to learn."""

    def lost(self, worker: str) -> None:
        """Nothing to forget."""

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """No plan changes."""
        return {}

    def figures(self) -> dict[str, float]:
        """Nothing is estimated."""
        return {}


def fixed_plan(
    num_draft_tokens: int, mode: SpeculationMode, draft_wait_s: float = 0.0, num_branches: int = 0
) -> Planner:
    """A planner that gives every sequence the same draft length, or the one its request names; none without drafts.

    Args:
        num_draft_tokens: Draft tokens per round where the request names none.
        mode: Of every plan.
        draft_wait_s: Of every plan.
        num_branches: Of every plan.
    """

    def plan(spec: SequenceSpec) -> Plan:
        wanted = spec.num_speculative_tokens
        length = num_draft_tokens if wanted is None else wanted
        return Plan(length, num_branches, mode=mode, draft_wait_s=draft_wait_s) if length else Plan()

    return plan


def no_drafts(spec: SequenceSpec) -> Plan:
    """A planner for a service without a draft model."""
    return Plan()
