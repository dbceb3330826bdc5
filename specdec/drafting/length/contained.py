"""A controller's errors cost speculation, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specdec.core.messages import Notes, Plan
from specdec.core.params import SequenceSpec
from specdec.drafting.length.plans import FixedPlans, Placements, PlanController, WorkerKind, no_drafts

logger = logging.getLogger(__name__)


class ContainedController:
    """Asks a controller until it raises. From then on nothing is drafted, and every sequence goes on plainly.

    Attributes:
        controller: Whoever is asked now.
    """

    def __init__(self, controller: PlanController) -> None:
        self.controller = controller
        self._has_failed = self._is_told = False

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """The sequence's first plan."""
        plan: Plan = self._ask("opened", seq, spec)
        return plan

    def closed(self, seq: str) -> None:
        """A sequence has ended."""
        self._ask("closed", seq)

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """New tokens of a sequence have come."""
        self._ask("decided", seq, notes, now_s)

    def reported(self, worker: str, kind: WorkerKind, report: Mapping[str, float]) -> None:
        """A worker's newest figures have come."""
        self._ask("reported", worker, kind, report)

    def echoed(self, worker: str, seconds: float) -> None:
        """A worker has answered a renewal."""
        self._ask("echoed", worker, seconds)

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        self._ask("lost", worker)

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """The plans that have changed; after an error all of them, once, to no drafts."""
        plans: dict[str, Plan] = self._ask("review", placements, now_s)
        if self._has_failed and not self._is_told:
            self._is_told = True
            return {seq: Plan() for seq in placements}
        return plans

    def figures(self) -> dict[str, float]:
        """Its choices and estimates, and whether it has failed."""
        figures: dict[str, float] = self._ask("figures")
        return {**figures, "has_failed_controller": float(self._has_failed)}

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.controller, method)(*arguments)
        except Exception:
            logger.exception("The controller failed: nothing is drafted from now on")
            self.controller, self._has_failed = FixedPlans(no_drafts), True
            return getattr(self.controller, method)(*arguments)
