"""Fixed plans, and by when their offers are to be sent: the length is the user's choice, the deadline a measurement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from specdec.control.choice import steps_until_offer
from specdec.control.settings import Settings
from specdec.control.workers import WorkerFigures, conditions_of
from specdec.protocol.messages import Plan
from specdec.protocol.plans import FixedPlans, Placements, Planner, WorkerKind
from specdec.sampling.params import SequenceSpec

_ROUND_TRIP_S = Settings.round_trip_s
_Pair = tuple[str, str]
"""A target and a drafter."""


@dataclass
class _Deadline:
    """Draft steps until an offer, as planned and as they came out last: once is no reason to plan all anew."""

    planned: int
    last: int

    def came_out(self, num_steps: int) -> None:
        if num_steps == self.last:
            self.planned = num_steps
        self.last = num_steps


class Deadlines(FixedPlans):
    """Gives each sequence its planner's plan, with ``num_fit_steps`` where it has branches; see :class:`Plan`.

    Without it the drafter does not know when the target's next step begins: with many sequences most of its offers
    come after that.

    Args:
        planner: Gives each sequence its plan; of its own ``num_fit_steps`` nothing is left.
    """

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner)
        self._plans: dict[str, Plan] = {}
        self._workers: dict[str, WorkerFigures] = {}
        self._deadlines: dict[tuple[_Pair, int, int], _Deadline] = {}
        self._newest: dict[tuple[int, int], int] = {}

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """The sequence's plan, with the newest deadline of such plans."""
        plan = super().opened(seq, spec)
        if plan.mode == "overlap" and plan.num_draft_tokens and plan.num_branches:
            plan = replace(plan, num_fit_steps=self._newest.get((plan.num_draft_tokens, plan.num_branches), 0))
            self._plans[seq] = plan
        return plan

    def closed(self, seq: str) -> None:
        """A sequence has ended; unknown ones are ignored."""
        self._plans.pop(seq, None)

    def reported(self, worker: str, kind: WorkerKind, report: Mapping[str, float]) -> None:
        """A worker's newest report has come."""
        self._workers.setdefault(worker, WorkerFigures(kind)).reported(report)

    def echoed(self, worker: str, seconds: float) -> None:
        """So long after a renewal was sent to a worker its answer came."""
        if worker in self._workers:
            self._workers[worker].echoed(seconds)

    def lost(self, worker: str) -> None:
        """A worker is gone, and what it measured with it."""
        self._workers.pop(worker, None)
        for key in [key for key in self._deadlines if worker in key[0]]:
            del self._deadlines[key]

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """Reckon deadlines anew; gives the plans whose deadline has changed, by sequence."""
        members: defaultdict[_Pair, list[str]] = defaultdict(list)
        used: Counter[str] = Counter()
        for seq, (target, drafter) in placements.items():
            used.update([target] if drafter is None else [target, drafter])
            if drafter is not None and seq in self._plans:
                members[target, drafter].append(seq)
        changed: dict[str, Plan] = {}
        for pair, seqs in members.items():
            changed.update(self._review_pair(pair, seqs, used))
        self._plans.update(changed)
        return changed

    def _review_pair(self, pair: _Pair, seqs: list[str], used: Counter[str]) -> dict[str, Plan]:
        target, drafter = (self._workers.get(name) for name in pair)
        if target is None or drafter is None:
            return {}
        num_rows, num_draft_rows = (used[name] for name in pair)
        conditions = conditions_of(
            target, drafter, num_rows, max(num_draft_rows, drafter.num_drafted_for), _ROUND_TRIP_S
        )
        if conditions is None:
            return {}
        most = drafter.branches_each(conditions.num_draft_rows)
        for length, branches in {(self._plans[seq].num_draft_tokens, self._plans[seq].num_branches) for seq in seqs}:
            steps = steps_until_offer(conditions, conditions.target_s(length), 1 + min(branches, most))
            steps = min(steps, length + 1)
            deadline = self._deadlines.setdefault((pair, length, branches), _Deadline(steps, steps))
            deadline.came_out(steps)
            self._newest[length, branches] = deadline.planned
        changed = {}
        for seq in seqs:
            plan = self._plans[seq]
            planned = self._deadlines[pair, plan.num_draft_tokens, plan.num_branches].planned
            if planned != plan.num_fit_steps:
                changed[seq] = replace(plan, num_fit_steps=planned)
        return changed
