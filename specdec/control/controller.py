"""The controller: holds the newest measurements, and says what each sequence's plan is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdec.control.choice import Bounds, own_length, plan_of, within
from specdec.control.estimates import DecayedRate, Round, TrackedRate, acceptance_trials, rounds_of
from specdec.control.group import Group
from specdec.control.limits import KINDS, OFF, Arm, Conditions
from specdec.control.settings import Settings
from specdec.control.workers import WorkerFigures, conditions_of
from specdec.protocol.messages import Notes, Plan
from specdec.protocol.plans import Placements, WorkerKind
from specdec.sampling.params import SequenceSpec

_PRIOR_ACCEPTANCE, _PRIOR_GUESSES = 0.7, 0.7
_PROVEN_TRIALS = 64
_RATE_WEIGHT = 32.0
_JUDGED: dict[WorkerKind, tuple[tuple[str, ...], str]] = {
    "target": (("num_branch_hits", "num_branch_late"), "num_branch_misses"),
    "drafter": (("num_right_tokens",), "num_wrong_tokens"),
}
"""Of what a worker reports, what tells how good guesses and draft tokens are: the right ones and the wrong ones.

Guesses that come late are right all the same: that they are late, the pace of the rounds tells.
"""


@dataclass
class Tracked:
    """A sequence as the controller sees it.

    Attributes:
        bound: The request's ``num_speculative_tokens``.
        arm: What its plan carries out.
        acceptance: Of late, for its own draft length.
        steady: Of long, as far as it stayed the same, for the choice of its group's arm.
        since: Rounds since the plan changed, or the arm that it is measured for.
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

    def follow(self, arm: Arm, plan: Plan) -> bool:
        """It carries out an arm from now on; whether that takes another plan.

        Two arms may have the same plan, where the request's bound or what tokens cost cuts both. The new arm is
        measured by it all the same, once it has settled: others' plans may have changed with the arm.
        """
        arm, differs = arm if plan.num_draft_tokens else OFF, _differs(plan, self.plan)
        if differs or arm != self.arm:
            self.since = 0
        self.arm = arm
        if differs:
            self.plan = plan
        return differs

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

    @property
    def is_drafted_for(self) -> bool:
        """Whether it takes part where its group drafts: it may, and is not off alone."""
        return self.may_draft and self.off_since_s is None


class Controller:
    """Chooses draft length, fan-out, mode and off per sequence, for the most tokens per second.

    A plain state machine over measurements: ``decided``, ``reported`` and ``echoed`` take them in, ``review`` gives the
    plans that have changed. Sequences that share a target form a group and speculate in one way; a sequence's own draft
    length follows its own acceptance rate and its request's bound.

    Attributes:
        bounds: What it may choose from.
    """

    def __init__(self, bounds: Bounds | None = None, settings: Settings | None = None) -> None:
        self.bounds = bounds or Bounds()
        settings = settings or Settings()
        first, probe = (within(arm, self.bounds) for arm in (settings.first_arm, settings.probe_arm))
        self._settings = replace(settings, first_arm=first, probe_arm=probe)
        self._sequences: dict[str, Tracked] = {}
        self._workers: dict[str, WorkerFigures] = {}
        self._groups: dict[str, Group] = {}
        self._has_drafter = True
        self._acceptance = TrackedRate()
        self._guesses = TrackedRate()

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """A sequence has come; its first plan is that of the largest group, within its request's bound."""
        bound = spec.num_speculative_tokens
        group = max(self._groups.values(), key=lambda group: group.num_rows, default=None)
        arm = self._settings.first_arm if group is None else group.arm
        length = own_length(arm, 1.0, 0.0, bound) if self._has_drafter else 0
        conditions = None if group is None else group.conditions
        plan = plan_of(arm, length, conditions, self.acceptance_rate)
        # Short requests end before a review places them; where there is but one target they are its.
        target = next(iter(self._groups)) if len(self._groups) == 1 else None
        self._sequences[seq] = Tracked(bound, plan, arm if plan.num_draft_tokens else OFF, target=target)
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
        if group is not None and one.seen_s is not None and one.may_draft:
            is_settled = one.since >= self._settings.settle_rounds
            group.heard(one.arm, rounds, now_s - one.seen_s, now_s, is_settled=is_settled)
        one.since += len(rounds)
        one.seen_s = now_s

    def reported(self, worker: str, kind: WorkerKind, report: Mapping[str, float]) -> None:
        """A worker's newest report has come."""
        figures = self._workers.setdefault(worker, WorkerFigures(kind))
        before = figures.report
        figures.reported(report)
        self._has_drafter |= kind == "drafter"
        rights, wrong = _JUDGED[kind]
        good = sum(report.get(name, 0.0) - before.get(name, 0.0) for name in rights)
        bad = report.get(wrong, 0.0) - before.get(wrong, 0.0)
        if not before or min(good, bad) < 0 or not good + bad:  # what a first report has counted may be of long ago
            return
        if kind == "drafter":  # drafts that come late are not verified, but no worse for that
            self._acceptance = self._acceptance.add(good, good + bad)
        elif (group := self._groups.get(worker)) is not None:
            self._guesses = group.guesses_from(self._guesses, good, bad, self.acceptance_rate)

    def echoed(self, worker: str, seconds: float) -> None:
        """So long after a renewal was sent to a worker its answer came."""
        figures = self._workers.get(worker)
        if figures is not None:
            figures.echoed(seconds)

    def lost(self, worker: str) -> None:
        """A worker is gone, and what it measured with it."""
        gone = self._workers.pop(worker, None)
        self._groups.pop(worker, None)
        if gone is not None and gone.kind == "drafter":
            self._has_drafter = bool(self._drafters)

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
        if placements:  # one that was placed on is there, though it has not reported yet
            self._has_drafter = bool(self._drafters) or any(drafter for _, drafter in placements.values())
        changed: dict[str, Plan] = {}
        for target, seqs in members.items():
            changed.update(self._review_group(target, seqs, placements, now_s))
        for target in [name for name in self._groups if name not in members]:
            self._groups[target].rest(now_s)
        return changed

    def _review_group(self, target: str, seqs: list[str], placements: Placements, now_s: float) -> dict[str, Plan]:
        group = self._groups.get(target)
        if group is None:
            group = self._groups[target] = Group(self._settings)
        able = [seq for seq in seqs if self._sequences[seq].may_draft]
        rates = {seq: self._sequences[seq].acceptance.rate(self.acceptance_rate, _RATE_WEIGHT) for seq in able}
        conditions = self._conditions(target, seqs, placements)
        bounds = self._bounds_for(conditions, able, [placements[seq][1] for seq in seqs])
        steady = [self._sequences[seq].steady.rate(self.acceptance_rate, _RATE_WEIGHT) for seq in able]
        group.review(conditions, steady, bounds, now_s)
        # Without a drafter nobody drafts: who has a plan that waits would wait for nothing.
        probing = set(group.probed(able, now_s)) if self._has_drafter else set()
        changed = {}
        plans: dict[tuple[Arm, int, int], Plan] = {}
        for seq in seqs:
            plan, arm = Plan(), OFF
            if self._has_drafter and seq in rates:
                arm = self._settings.probe_arm if seq in probing else group.arm
                price = 0.0 if seq in probing else group.token_price
                if seq not in probing:
                    rates[seq] = self._own_rate(seq, rates[seq], group, now_s)
                length = own_length(arm, 1.0 if seq in probing else rates[seq], price, self._sequences[seq].bound)
                kind = arm, length, round(rates[seq] * 20)
                if kind not in plans:
                    plans[kind] = plan_of(arm, length, conditions, kind[-1] / 20)
                plan = plans[kind]
            if self._sequences[seq].follow(arm, plan):
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
        figures, drafters = self._workers.get(target), self._drafters
        used = Counter(name for seq in seqs if (name := placements[seq][1]) in drafters)
        if figures is None or not drafters:
            return None
        name = max(drafters, key=lambda name: (used[name], bool(drafters[name].steps)))
        drafter = drafters[name]
        num_drafted_for = sum(one.is_drafted_for for one in self._sequences.values())
        # Other routers' sequences are in the report alone, and in ours those that do not draft for now.
        num_draft_rows = max(-(-num_drafted_for // len(drafters)), used[name], drafter.num_drafted_for)
        guess_rate = self._guesses.rate(_PRIOR_GUESSES, 16.0)
        return conditions_of(figures, drafter, len(seqs), num_draft_rows, self._settings.round_trip_s, guess_rate)

    def _bounds_for(self, conditions: Conditions | None, able: Iterable[str], placed: Iterable[str | None]) -> Bounds:
        """No more branches of each sequence than all of its drafters have room for; without any, those it may get.

        And no longer drafts than any of the sequences that may draft may have.
        """
        if conditions is None:
            return self.bounds
        drafters = self._drafters
        used = drafters.keys() & set(placed) or drafters.keys()
        most = min(drafters[name].branches_each(conditions.num_draft_rows) for name in used)
        lengths = [self.bounds.num_draft_tokens if (one := self._sequences[seq].bound) is None else one for seq in able]
        longest = min(self.bounds.num_draft_tokens, max(lengths, default=0))
        return replace(self.bounds, num_draft_tokens=longest, num_branches=min(self.bounds.num_branches, most))

    @property
    def _drafters(self) -> dict[str, WorkerFigures]:
        return {name: one for name, one in self._workers.items() if one.kind == "drafter"}

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
