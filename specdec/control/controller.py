"""The controller: holds the newest measurements, and says what each sequence's plan is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specdec.control.estimates import DecayedRate, tally
from specdec.control.group import KNOWN_TRIALS, PRIOR_RATE, PRIOR_TRIALS, PROBE, Group
from specdec.control.ways import OFF, WAYS, Bounds, Choice, Conditions, own_length
from specdec.control.workers import WorkerFigures
from specdec.protocol.messages import Notes, Plan
from specdec.protocol.plans import IN_TURN_WAIT_S, Placements, WorkerKind
from specdec.sampling.params import SequenceSpec

OWN_TRIALS = 32.0
"""A sequence's rate is that of its kind until so many of its own draft tokens were judged."""
SETTLE_ROUNDS = 2
"""Rounds after a change of plan that are not measured: they began under the plan before."""


@dataclass
class Tracked:
    """A sequence as the controller sees it.

    Attributes:
        bound: The request's ``num_speculative_tokens``.
        kind: Its temperature, roughly: acceptance depends on it.
        since: Rounds since the plan changed.
        seen_s: When it was last decided.
    """

    bound: int | None
    kind: float
    plan: Plan = field(default_factory=Plan)
    choice: Choice = OFF
    acceptance: DecayedRate = field(default_factory=DecayedRate)
    since: int = 0
    seen_s: float | None = None
    target: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether its request allows less than was chosen, so that its pace says little of the choice."""
        return self.bound is not None and self.bound < self.choice.num_draft_tokens

    def follow(self, choice: Choice, plan: Plan) -> bool:
        """It carries out a choice from now on; whether that takes another plan."""
        choice = choice if plan.num_draft_tokens else OFF
        differs = _differs(plan, self.plan)
        if differs or choice != self.choice:
            self.choice, self.since = choice, 0
        self.plan = plan if differs else self.plan
        return differs


class Controller:
    """Chooses way, draft length and fan-out per sequence, for the most tokens per second.

    ``decided``, ``reported`` and ``echoed`` take measurements in, ``review`` gives the plans that have changed.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        ways = self.bounds.ways
        self._probe = PROBE if PROBE.way in ways else PROBE._replace(way="overlap")
        self._sequences: dict[str, Tracked] = {}
        self._workers: dict[str, WorkerFigures] = {}
        self._groups: dict[str, Group] = {}
        self._acceptance: defaultdict[float, DecayedRate] = defaultdict(DecayedRate)

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """A sequence has come; its first plan is what was learned before, within its request's bound."""
        one = Tracked(spec.num_speculative_tokens, round(2 * spec.sampling.temperature) / 2)
        self._sequences[seq] = one
        # Short requests end before a review places them; where there is but one target they are its.
        if len(self._groups) == 1 and self._drafters:
            one.target, group = next(iter(self._groups.items()))
            choice = group.choice_at(sum(other.bound != 0 for other in self._sequences.values()))
            one.follow(choice, self._plan(one, choice, group))
        return one.plan

    def closed(self, seq: str) -> None:
        """A sequence has ended; unknown ones are ignored."""
        self._sequences.pop(seq, None)

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """New tokens of a sequence have come."""
        one, rounds = self._sequences.get(seq), tally(notes.how, notes.num_drafted)
        if one is None or not rounds.num_rounds:
            return
        one.acceptance = one.acceptance.add(rounds.num_accepted, rounds.num_judged)
        self._acceptance[one.kind] = self._acceptance[one.kind].add(rounds.num_accepted, rounds.num_judged)
        group = self._groups.get(one.target or "")
        if group is not None and seq == group.probing:
            group.probed(rounds.num_rounds)
        elif group is not None and one.seen_s is not None and one.since >= SETTLE_ROUNDS and not one.is_cut:
            num_tokens = rounds.num_rounds + rounds.num_accepted
            group.heard(one.choice, rounds.num_rounds, num_tokens, now_s - one.seen_s, now_s)
        one.since += rounds.num_rounds
        one.seen_s = now_s

    def reported(self, worker: str, kind: WorkerKind, report: Mapping[str, float]) -> None:
        """A worker's newest report has come."""
        figures = self._workers.setdefault(worker, WorkerFigures(kind))
        before = figures.report
        figures.reported(report)
        if worker in self._groups and before:  # what a first report has counted may be of long ago
            hits, misses = (
                report.get(name, 0.0) - before.get(name, 0.0) for name in ("num_branch_hits", "num_branch_misses")
            )
            if min(hits, misses) >= 0:
                self._groups[worker].guesses_reported(hits, misses)

    def echoed(self, worker: str, seconds: float) -> None:
        """So long after a renewal was sent to a worker its answer came."""
        if worker in self._workers:
            self._workers[worker].echoed(seconds)

    def lost(self, worker: str) -> None:
        """A worker is gone, and what was learned of it."""
        self._workers.pop(worker, None)
        self._groups.pop(worker, None)

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """Choose anew. Gives the plans that have changed, by sequence."""
        members: defaultdict[str, list[str]] = defaultdict(list)
        for seq, (target, _) in placements.items():
            if seq in self._sequences:
                self._sequences[seq].target = target
                members[target].append(seq)
        changed: dict[str, Plan] = {}
        for target, seqs in members.items():
            changed.update(self._review_group(target, seqs, placements, now_s))
        return changed

    def _review_group(self, target: str, seqs: list[str], placements: Placements, now_s: float) -> dict[str, Plan]:
        group = self._groups.setdefault(target, Group())
        able = [seq for seq in seqs if self._sequences[seq].bound != 0]
        conditions, room = self._conditions(target, seqs, placements, group.guess_rate)
        rates = [self._rate(self._sequences[seq]) for seq in able]
        mean_rate = sum(rates) / len(rates) if rates else group.acceptance_rate
        most = self.bounds.num_draft_tokens
        longest = max(
            (most if (own := self._sequences[seq].bound) is None else min(own, most) for seq in able), default=0
        )
        branches = min(self.bounds.num_branches, room)
        group.review(
            conditions, mean_rate, replace(self.bounds, num_draft_tokens=longest, num_branches=branches), now_s
        )
        unknown = [seq for seq in able if self._acceptance[self._sequences[seq].kind].trials < KNOWN_TRIALS]
        probing = group.probe(unknown, able) if conditions is not None else None
        changed = {}
        for seq in seqs:
            one = self._sequences[seq]
            choice = self._probe if seq == probing else group.choice
            plan = self._plan(one, choice, group)
            if one.follow(choice, plan):
                changed[seq] = plan
        return changed

    def _plan(self, one: Tracked, choice: Choice, group: Group) -> Plan:
        """The plan that carries out a choice for one sequence."""
        if choice == OFF or one.bound == 0 or group.conditions is None:
            return Plan()
        rate = self._rate(one)
        length = own_length(choice, group.acceptance_rate, rate, one.bound)
        wait_s = IN_TURN_WAIT_S if choice.way == "in_turn" else 0.0
        rate = round(20 * rate) / 20
        return Plan(length, choice.num_branches, acceptance_rate=rate, mode=choice.way, draft_wait_s=wait_s)

    def _rate(self, one: Tracked) -> float:
        return one.acceptance.rate(self._acceptance[one.kind].rate(PRIOR_RATE, PRIOR_TRIALS), OWN_TRIALS)

    def _conditions(
        self, target: str, seqs: list[str], placements: Placements, guess_rate: float
    ) -> tuple[Conditions | None, int]:
        """None while too little was measured; and for how many branches of a sequence its drafter has room."""
        figures, drafters = self._workers.get(target), self._drafters
        if figures is None or not drafters:
            return None, 0
        used = Counter(name for seq in seqs if (name := placements[seq][1]) in drafters)
        drafter = drafters[max(drafters, key=lambda name: (used[name], bool(drafters[name].steps)))]
        num_able = sum(one.bound != 0 for one in self._sequences.values())
        num_draft_rows = max(1, -(-num_able // len(drafters)))
        if not figures.steps or not drafter.steps:
            return None, 0
        num_rows, trips_s = max(len(seqs), figures.num_sequences), figures.round_trip_s + drafter.round_trip_s
        found = Conditions(figures.steps, drafter.steps, num_rows, num_draft_rows, trips_s, guess_rate)
        return found, drafter.branches_each(num_draft_rows)

    @property
    def _drafters(self) -> dict[str, WorkerFigures]:
        return {name: one for name, one in self._workers.items() if one.kind == "drafter"}

    def figures(self) -> dict[str, dict[str, float]]:
        """Choices and estimates by name: those of one target under its name, the others under the empty one."""
        ones = self._sequences.values()
        ways = Counter(one.choice.way for one in ones)
        drafting = [one.plan for one in ones if one.plan.num_draft_tokens]
        count, groups = max(1, len(drafting)), self._groups.values()
        rates = [group.acceptance_rate for group in groups] or [PRIOR_RATE]
        overall = {
            "planned_draft_tokens": sum(plan.num_draft_tokens for plan in drafting) / count,
            "planned_branches": sum(plan.num_branches for plan in drafting) / count,
            "estimated_acceptance_rate": sum(rates) / len(rates),
        }
        overall |= {f"planned_sequences/{way}": float(ways[way]) for way in WAYS}
        return {"": overall} | {target: group.figures() for target, group in self._groups.items()}


def _differs(a: Plan, b: Plan) -> bool:
    """Whether a plan is worth a message: a rate that only drifts a little is not."""
    if (a.num_draft_tokens, a.num_branches, a.mode) != (b.num_draft_tokens, b.num_branches, b.mode):
        return True
    return bool(a.num_draft_tokens) and abs(a.acceptance_rate - b.acceptance_rate) > 0.06
