"""The controller: holds the newest measurements, and says what each sequence's plan is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdec.control.choice import Bounds, own_length, plan_of, within
from specdec.control.estimates import DecayedRate, Round, TrackedRate, acceptance_trials, rounds_of
from specdec.control.group import Group, Settings
from specdec.control.limits import KINDS, OFF, Arm, Conditions
from specdec.control.steptimes import StepTimes, step_times
from specdec.protocol.branches import branch_share
from specdec.protocol.messages import Notes, Plan
from specdec.protocol.plans import Placements, WorkerKind
from specdec.sampling.params import SequenceSpec

_ECHOES_KEPT = 32
_PRIOR_ACCEPTANCE, _PRIOR_GUESSES = 0.7, 0.7
_PROVEN_TRIALS = 64
_RATE_WEIGHT = 32.0
_FULL_CACHE, _ROOM_AGAIN = 0.95, 0.8
"""Usage from which a cache is full, and below which it no longer is: branches make up a part of it themselves."""


@dataclass
class Tracked:
    """A sequence as the controller sees it.

    Attributes:
        bound: The request's ``num_speculative_tokens``.
        arm: What its plan carries out.
        acceptance: Of late, for its own draft length.
        steady: Of long, as far as it stayed the same, for the choice of its group's arm.
        since: Rounds since the plan changed.
        seen_s: When it was last decided.
        off_since_s: Since when it drafts nothing in a group that drafts; None while it does as the others do.
        patience_s: How long that lasts before it is tried again; twice as long each time in vain.
    """

    bound: int | None
    plan: Plan
    arm: Arm
    acceptance: DecayedRate = field(default_factory=DecayedRate)
    steady: TrackedRate = field(default_factory=TrackedRate)
    since: int = 0
    seen_s: float | None = None
    target: str | None = None
    off_since_s: float | None = None
    patience_s: float = 0.0

    def may_return(self, settings: Settings, now_s: float) -> bool:
        """Whether it has been off for long enough, while others drafted, that its rate may have become another."""
        if self.off_since_s is None:
            self.off_since_s = now_s
            self.patience_s = min(2 * self.patience_s or settings.probe_first_s, settings.probe_last_s)
        return now_s >= self.off_since_s + self.patience_s

    @property
    def may_draft(self) -> bool:
        """Whether its request allows any draft."""
        return self.bound != 0


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

    def echoed(self, seconds: float) -> None:
        """An echo came. A busy worker answers after its next step: what took longer than a step is taken for that."""
        step_s = self._step_s()
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


class Controller:
    """Chooses draft length, fan-out, mode and off per sequence, for the most tokens per second.

    A plain state machine over measurements: ``decided``, ``reported`` and ``echoed`` take them in, ``review`` gives the
    plans that have changed. Sequences that share a target form a group and speculate in one way; a sequence's own draft
    length follows its own acceptance rate and its request's bound.
    """

    def __init__(self, bounds: Bounds | None = None, settings: Settings | None = None) -> None:
        self._bounds = bounds or Bounds()
        settings = settings or Settings()
        first, probe = (within(arm, self._bounds) for arm in (settings.first_arm, settings.probe_arm))
        self._settings = replace(settings, first_arm=first, probe_arm=probe)
        self._sequences: dict[str, Tracked] = {}
        self._workers: dict[str, WorkerFigures] = {}
        self._groups: dict[str, Group] = {}
        self._acceptance = TrackedRate()
        self._guesses = TrackedRate()

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """A sequence has come; its first plan is that of the largest group, within its request's bound."""
        bound = spec.num_speculative_tokens
        group = max(self._groups.values(), key=lambda group: group.num_rows, default=None)
        arm = self._settings.first_arm if group is None else group.arm
        length = own_length(arm, 1.0, 0.0, bound)
        conditions = None if group is None else group.conditions
        plan = plan_of(arm, length, conditions, self.acceptance_rate)
        self._sequences[seq] = Tracked(bound, plan, arm if plan.num_draft_tokens else OFF)
        return plan

    def closed(self, seq: str) -> None:
        """A sequence has ended; unknown ones are ignored."""
        self._sequences.pop(seq, None)

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """New tokens of a sequence have come."""
        self.judged(seq, rounds_of(notes.how, notes.num_drafted), now_s)

    def judged(self, seq: str, rounds: Sequence[Round], now_s: float) -> None:
        """The same, as rounds."""
        one = self._sequences.get(seq)
        if one is None or not rounds:
            return
        accepted, judged = acceptance_trials(rounds)
        if judged:
            one.acceptance = one.acceptance.add(accepted, judged)
            one.steady = one.steady.add(accepted, judged)
            self._acceptance = self._acceptance.add(accepted, judged)
        group = self._groups.get(one.target or "")
        if group is not None and one.seen_s is not None and one.since >= self._settings.settle_rounds:
            group.observe(one.arm, rounds, now_s - one.seen_s)
        one.since += len(rounds)
        one.seen_s = now_s

    def reported(self, worker: str, kind: WorkerKind, report: Mapping[str, float]) -> None:
        """A worker's newest report has come."""
        figures = self._workers.setdefault(worker, WorkerFigures(kind))
        before = figures.report
        figures.reported(report)
        if kind == "target":
            hits = report.get("num_branch_hits", 0.0) - before.get("num_branch_hits", 0.0)
            misses = report.get("num_branch_misses", 0.0) - before.get("num_branch_misses", 0.0)
            group = self._groups.get(worker)
            if group is not None and hits >= 0 and misses >= 0 and hits + misses > 0:
                self._guesses = group.guesses_from(self._guesses, hits, misses, self.acceptance_rate)

    def echoed(self, worker: str, seconds: float) -> None:
        """So long after a renewal was sent to a worker its answer came."""
        figures = self._workers.get(worker)
        if figures is not None:
            figures.echoed(seconds)

    def lost(self, worker: str) -> None:
        """A worker is gone, and what it measured with it."""
        self._workers.pop(worker, None)
        self._groups.pop(worker, None)

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """Choose anew. Gives the plans that have changed, by sequence.

        Args:
            placements: Target and drafter of each sequence that has a target.
            now_s: Time.
        """
        members: defaultdict[str, list[str]] = defaultdict(list)
        for seq, (target, _) in placements.items():
            if seq in self._sequences:
                self._sequences[seq].target = target
                members[target].append(seq)
        changed: dict[str, Plan] = {}
        for target, seqs in members.items():
            changed.update(self._review_group(target, seqs, placements, now_s))
        for target in [name for name in self._groups if name not in members]:
            self._groups[target].num_rows = 0
        return changed

    def _review_group(self, target: str, seqs: list[str], placements: Placements, now_s: float) -> dict[str, Plan]:
        group = self._groups.get(target)
        if group is None:
            group = self._groups[target] = Group(self._settings, now_s)
        able = [seq for seq in seqs if self._sequences[seq].may_draft]
        rates = {seq: self._sequences[seq].acceptance.rate(self.acceptance_rate, _RATE_WEIGHT) for seq in able}
        conditions = self._conditions(target, seqs, placements)
        bounds = self._bounds_for(conditions, [placements[seq][1] for seq in seqs])
        steady = [self._sequences[seq].steady.rate(self.acceptance_rate, _RATE_WEIGHT) for seq in able]
        group.review(conditions, steady, bounds, now_s)
        probing = set(group.probed(able, now_s))
        changed = {}
        plans: dict[tuple[Arm, int, int], Plan] = {}
        for seq in seqs:
            plan, arm = Plan(), OFF
            if seq in rates:
                arm = self._settings.probe_arm if seq in probing else group.arm
                price = 0.0 if seq in probing else group.token_price
                if seq not in probing:
                    rates[seq] = self._own_rate(seq, rates[seq], group, now_s)
                length = own_length(arm, 1.0 if seq in probing else rates[seq], price, self._sequences[seq].bound)
                kind = arm, length, round(rates[seq] * 20)
                if kind not in plans:
                    plans[kind] = plan_of(arm, length, conditions, kind[-1] / 20)
                plan = plans[kind]
            one = self._sequences[seq]
            if _differs(plan, one.plan):
                one.since = 0
                one.plan, one.arm = plan, arm if plan.num_draft_tokens else OFF
                changed[seq] = plan
        return changed

    def _own_rate(self, seq: str, rate: float, group: Group, now_s: float) -> float:
        """A sequence's rate; one that is off alone is not judged any more, and begins anew after a while."""
        one = self._sequences[seq]
        length = own_length(group.arm, rate, group.token_price, one.bound)
        if group.arm != OFF and not length:
            if not one.may_return(self._settings, now_s):
                return rate
            one.acceptance, one.steady, rate = DecayedRate(), TrackedRate(), self.acceptance_rate
        elif length == group.arm.num_draft_tokens and one.acceptance.trials >= _PROVEN_TRIALS:
            one.patience_s = 0.0
        one.off_since_s = None
        return rate

    def _conditions(self, target: str, seqs: list[str], placements: Placements) -> Conditions | None:
        """None while too little was measured."""
        figures = self._workers.get(target)
        drafters = {name: one for name, one in self._workers.items() if one.kind == "drafter"}
        used = Counter(name for seq in seqs if (name := placements[seq][1]) in drafters)
        drafter = used.most_common(1)[0][0] if used else next(iter(drafters), None)
        if figures is None or drafter is None or not figures.steps or not drafters[drafter].steps:
            return None
        num_draft_rows = max(-(-len(self._sequences) // len(drafters)), used[drafter])
        trips = [figures.round_trip_s, drafters[drafter].round_trip_s]
        return Conditions(
            target=figures.steps,
            draft=drafters[drafter].steps,
            num_rows=max(len(seqs), figures.num_sequences),
            num_draft_rows=num_draft_rows,
            round_trip_s=sum(self._settings.round_trip_s / 2 if trip is None else trip for trip in trips),
            guess_rate=self._guesses.rate(_PRIOR_GUESSES, 16.0),
        )

    def _bounds_for(self, conditions: Conditions | None, drafters: Iterable[str | None]) -> Bounds:
        """No more branches of each sequence than all of its drafters have room for; without any, those it may get."""
        if conditions is None:
            return self._bounds
        able = {name: one for name, one in self._workers.items() if one.kind == "drafter"}
        used = able.keys() & set(drafters) or able.keys()
        most = min(able[name].branches_each(conditions.num_draft_rows) for name in used)
        return replace(self._bounds, num_branches=min(self._bounds.num_branches, most))

    @property
    def acceptance_rate(self) -> float:
        """Per draft token, over all sequences of late."""
        return self._acceptance.rate(_PRIOR_ACCEPTANCE, 4.0)

    def figures(self) -> dict[str, dict[str, float]]:
        """Choices and estimates by name: those of one target under its name, the others under the empty one."""
        ones = self._sequences.values()
        kinds = Counter(one.arm.kind for one in ones)
        drafting = [one.plan for one in ones if one.plan.num_draft_tokens]
        count = max(1, len(drafting))
        overall = {
            "planned_draft_tokens": sum(plan.num_draft_tokens for plan in drafting) / count,
            "planned_branches": sum(plan.num_branches for plan in drafting) / count,
            "planned_draft_wait_seconds": sum(plan.draft_wait_s for plan in drafting) / count,
            "estimated_acceptance_rate": self.acceptance_rate,
            "estimated_guess_rate": self._guesses.rate(_PRIOR_GUESSES, 16.0),
        }
        overall |= {f"planned_sequences/{kind}": float(kinds[kind]) for kind in KINDS}
        return {"": overall} | {target: group.figures() for target, group in self._groups.items()}


def _differs(a: Plan, b: Plan) -> bool:
    """Whether a plan is worth a message: figures that only drift a little are not."""
    if not a.num_draft_tokens and not b.num_draft_tokens:
        return False
    if (a.num_draft_tokens, a.num_branches, a.mode, a.num_fit_steps) != (
        b.num_draft_tokens,
        b.num_branches,
        b.mode,
        b.num_fit_steps,
    ):
        return True
    return (
        abs(a.acceptance_rate - b.acceptance_rate) > 0.06 or abs(a.draft_wait_s - b.draft_wait_s) > 0.1 * b.draft_wait_s
    )
