"""Who plans: the border between the router and its controller, and the plainest controller there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from specdec.core.messages import Notes, Plan
from specdec.core.params import SequenceSpec
from specdec.core.types import SpeculationMode

logger = logging.getLogger(__name__)

_REVIEW_S = 0.25
"""Period of the controller's reviews: short beside a sequence, long beside a step."""
_SOON_S = 0.05
"""Time after a sequence has come in which no other came, until a review: its first plan may be another load's."""
_QUIET_TURN = 2
"""Of the turns since a verdict came: its commit has left by then, and what is offered after it has time yet."""
WorkerKind = str
"""``target`` or ``drafter``."""
Planner = Callable[[SequenceSpec], Plan]
SEQUENTIAL_WAIT_S = 1.0
"""Longest wait of a target for a draft in mode ``sequential``; a drafter that is gone costs this once per sequence."""
Placements = Mapping[str, tuple[str, str | None]]
"""Target and drafter of each sequence that has a target."""


class PlanController:
    """Chooses plans from what the router tells it. No clock, no messages of its own.

    This one gives each sequence the plan of its planner, learns nothing and changes no plan.

    Args:
        planner: Gives each sequence its plan.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """A sequence has come; its first plan."""
        return self._planner(spec)

    def closed(self, seq: str) -> None:
        """A sequence has ended; unknown ones are ignored."""

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """New tokens of a sequence have come."""

    def reported(self, worker: str, kind: WorkerKind, metrics: Mapping[str, float]) -> None:
        """A worker's newest counters and gauges have come."""

    def lost(self, worker: str) -> None:
        """A worker is gone."""

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """Choose anew; gives the plans that have changed, by sequence. Called a few times a second."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Choices and estimates by name; what belongs to one target, or one mode, is named ``name/<target>``."""
        return {}


class Planning:
    """A router's one door to its controller: when that is asked, and what follows its errors.

    A review may take as long as some draft steps do, and what is relayed in its turn waits. So the controller hears of
    tokens in the second turn after a verdict, in which little is relayed, and reviews then, or after another period.
    A controller that raises is asked no more: from then on nothing is drafted, and every sequence goes on plainly.

    Args:
        planner: Gives each sequence its plan, once; or a controller, which may change it.
    """

    def __init__(self, planner: Planner | PlanController) -> None:
        self._controller = planner if isinstance(planner, PlanController) else PlanController(planner)
        self._has_failed = self._is_reported = False
        self._decided: list[tuple[str, Notes, float]] = []
        self._reviewed_s = float("-inf")
        self._turns = 0
        self._has_opened = False
        self._opened_s: float | None = None

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """A sequence has come; its first plan, which is soon reviewed."""
        self._has_opened = True
        plan: Plan = self._ask("opened", seq, spec)
        return plan

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """New tokens of a sequence have come; the controller hears of them later."""
        self._decided.append((seq, notes, now_s))
        self._turns = 0

    def closed(self, seq: str) -> None:
        """A sequence has ended."""
        self._hand_over()
        self._ask("closed", seq)

    def reported(self, worker: str, kind: WorkerKind, metrics: Mapping[str, float]) -> None:
        """A worker's newest counters and gauges have come."""
        self._ask("reported", worker, kind, metrics)

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        self._ask("lost", worker)

    def take_turn(self, now_s: float) -> bool:
        """Once in every turn of the relay; True if the controller is to be asked for a review in this one."""
        self._turns += 1
        is_quiet, waited_s = self._turns == _QUIET_TURN, now_s - self._reviewed_s
        is_due = waited_s >= 2 * _REVIEW_S or (is_quiet and waited_s >= _REVIEW_S)
        if self._has_opened:
            self._has_opened, self._opened_s = False, now_s
        is_due |= self._opened_s is not None and now_s - self._opened_s >= _SOON_S
        if is_due or is_quiet:
            self._hand_over()
        if is_due:
            self._reviewed_s, self._opened_s = now_s, None
        return is_due

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """The plans that have changed; after an error all of them, once, to no drafts."""
        plans: dict[str, Plan] = self._ask("review", placements, now_s)
        if self._has_failed and not self._is_reported:
            self._is_reported = True
            return {seq: Plan() for seq in placements}
        return plans

    def metrics(self) -> dict[str, float]:
        """The controller's choices and estimates, and whether it has failed."""
        metrics: dict[str, float] = self._ask("metrics")
        return {**metrics, "has_failed_controller": float(self._has_failed)}

    def _hand_over(self) -> None:
        for seq, notes, then_s in self._decided:
            self._ask("decided", seq, notes, then_s)
        self._decided.clear()

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._controller, method)(*arguments)
        except Exception:
            logger.exception(
                "The controller failed: nothing is drafted until this router is restarted. Please report it."
            )
            self._controller, self._has_failed = PlanController(no_drafts), True
            return getattr(self._controller, method)(*arguments)


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
