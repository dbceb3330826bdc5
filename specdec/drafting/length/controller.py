"""The controller: holds the newest measurements, chooses for groups of sequences, and says what each one's plan is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdec.core.messages import DRAFTER, Notes, Plan
from specdec.core.params import SequenceSpec
from specdec.core.types import SpeculationMode
from specdec.drafting.branches import branch_share
from specdec.drafting.length.drafters import DrafterChoice
from specdec.drafting.length.estimates import PRIOR_RATE, PRIOR_TRIALS, Acceptance, DecayedRate, kind_of, tally
from specdec.drafting.length.modes import (
    MODES,
    OFF,
    Bounds,
    Choice,
    Conditions,
    StepTimes,
    best_by_mode,
    guess_rate_of,
    pace,
    step_times,
)
from specdec.drafting.length.plans import SEQUENTIAL_WAIT_S, Placements, PlanController, WorkerKind

MARGIN, GAIN = 0.05, 0.1
"""What is followed gives way to what is better by the one; drafting has to give the other more than none."""
CAUTION = 0.9
"""What a mode that was never measured is taken to give, of what its formula says beside the target alone's."""
PROBE = Choice("sequential", 2)
SHARED_PROBE = PROBE._replace(mode="overlap")
"""Of a sequence that shares its target's steps: one that waited for its draft would miss the next of them."""
PROBE_ROUNDS = 8
PROBE_SHARE = 0.005
"""Part of the target's rows that carry a probe's drafts."""
PRIOR_TOKENS, AGE_S = 16.0, 1800.0
"""A factor trusts its prior like so many tokens of each sequence, and itself 1/e after so long without news."""


@dataclass
class Group:
    """What is known of the sequences of one target, whether or not any is there.

    Choices and factors are kept by load, in octaves of the number of rows.

    Attributes:
        choice: What is followed now.
        conditions: As of the last review; None while too little is measured.
        probing: The sequence that probes.
        drafters: Which of several draft.
        named: Their names, as of the last review that chose drafts; none where all do.
    """

    choice: Choice = OFF
    drafters: DrafterChoice = field(default_factory=DrafterChoice)
    named: tuple[str, ...] = ()
    conditions: Conditions | None = None
    acceptance_rate: float = PRIOR_RATE
    guesses: DecayedRate = field(default_factory=DecayedRate)
    probing: str | None = None
    _choices: dict[int, Choice] = field(default_factory=dict)
    _factors: dict[tuple[SpeculationMode, int], tuple[DecayedRate, float]] = field(default_factory=dict)
    _gain: float = 1.0
    _probe_rounds: int = 0
    _rest_rounds: float = 0.0

    def choice_at(self, num_rows: int) -> Choice:
        """What was chosen last with about so many rows, before a review has seen them."""
        return self._choices.get(num_rows.bit_length(), self.choice)

    def would_draft(self, num_rows: int) -> bool:
        """Whether drafts were chosen last with about so many rows, or nothing was chosen yet."""
        return self._choices.get(num_rows.bit_length()) != OFF

    @property
    def guess_rate(self) -> float:
        """How often the draft's next guess is right; a half until it is measured."""
        return self.guesses.rate(PRIOR_RATE, PRIOR_TRIALS)

    def observe(self, choice: Choice, num_tokens: int, seconds: float, now_s: float) -> None:
        """A sequence that follows a choice, for a while already, had so many tokens in so many seconds."""
        conditions = self.conditions
        if conditions is None or choice != self.choice:
            return
        expected, num_rows = pace(choice, conditions, self.acceptance_rate), conditions.num_rows
        num_expected = min(seconds * expected, 4.0 * num_tokens)  # being preempted is not the mode's doing
        key = choice.mode, num_rows.bit_length()
        factor, _ = self._factors.get(key, (DecayedRate(), now_s))
        self._factors[key] = factor.add(num_tokens / num_rows, num_expected / num_rows), now_s

    def rested(self, num_rounds: int) -> None:
        """A sequence went through rounds in which it drafts nothing."""
        self._rest_rounds -= num_rounds

    def probed(self, num_rounds: int) -> None:
        """The sequence that probes had so many rounds. A probe goes on until the next review: it costs what it took."""
        self._probe_rounds += num_rounds
        self._rest_rounds += num_rounds / PROBE_SHARE

    def guesses_reported(self, hits: float, misses: float) -> None:
        """Branch hits and misses since the last report."""
        choice, count = self.choice, hits + misses
        if choice.mode != "outcomes" or not count:
            return
        rate = guess_rate_of(hits / count, self.acceptance_rate, choice.num_draft_tokens, choice.num_branches)
        self.guesses = self.guesses.add(rate * count, count)

    def review(self, conditions: Conditions | None, acceptance_rate: float, bounds: Bounds, now_s: float) -> None:
        """Choose anew: the best choice of each mode by its formula, and among those the best by what was measured."""
        self.conditions, self.acceptance_rate = conditions, acceptance_rate
        if conditions is None or not bounds.num_draft_tokens:  # where nobody may draft nothing is learned from that
            self.choice = OFF
            return
        octave = conditions.num_rows.bit_length()
        present = self._choices.get(octave, OFF)
        choices = best_by_mode(conditions, acceptance_rate, bounds)
        if present in set(bounds.choices()):
            choices.append(present)
        scores = {
            choice: pace(choice, conditions, acceptance_rate) * self.factor(choice.mode, conditions, now_s)
            for choice in choices
        }
        winner = max(scores, key=scores.__getitem__)
        if scores[winner] <= scores.get(present, 0.0) * (1 + MARGIN):
            winner = present
        if scores[winner] <= scores[OFF] * (1 + GAIN):
            winner = OFF
        self.choice = self._choices[octave] = winner
        self._gain = max((score / scores[OFF] for choice, score in scores.items() if choice != OFF), default=1.0)
        if winner != OFF:
            self._rest_rounds = 0.0

    def factor(self, mode: SpeculationMode, conditions: Conditions, now_s: float) -> float:
        """Measured over predicted pace of a mode: at this load, or else at those that are nearest to it."""
        factor, octave = 1.0, conditions.num_rows.bit_length()
        if mode != "off":  # whatever slows the target down when it is alone slows it down in any mode
            alone_s = 1 / (pace(OFF, conditions, 0.0) * self.factor("off", conditions, now_s))
            factor = CAUTION * min(1.0, conditions.target_s(0) / alone_s)
        measured = [(-abs(at - octave), *one) for (other, at), one in self._factors.items() if other == mode]
        for _, rate, at_s in sorted(measured, key=lambda entry: entry[0]):
            factor = rate.times(math.exp((at_s - now_s) / AGE_S)).rate(factor, PRIOR_TOKENS / factor)
        return factor

    def probe(self, able: Sequence[str]) -> str | None:
        """While off, the one of the sequences that may draft that drafts a little, now and then: the first of them."""
        if self.choice != OFF or self.probing not in able or self._probe_rounds >= PROBE_ROUNDS:
            self.probing, self._probe_rounds = None, 0
        if self.choice == OFF and able and self.probing is None and self._rest_rounds <= 0:
            self.probing = able[0]
        return self.probing

    def metrics(self) -> dict[str, float]:
        """Estimates as of the last review, by name: gains are tokens per second over those of plain decoding."""
        metrics = {"estimated_guess_rate": self.guess_rate}
        if self.conditions is not None:
            paces = [pace(choice, self.conditions, self.acceptance_rate) for choice in (self.choice, OFF)]
            metrics |= {"estimated_gain": paces[0] / paces[1], "measured_gain": self._gain}
        return metrics


UNKNOWN_TRIP_S = 0.002
"""To a worker and back, until it is measured."""
_ECHOES_KEPT = 32


@dataclass
class WorkerMetrics:
    """What a worker last reported, and the step times that it reported first: those it profiled as it loaded."""

    kind: WorkerKind
    steps: StepTimes = field(default_factory=StepTimes)
    profile: StepTimes = field(default_factory=StepTimes)
    metrics: Mapping[str, float] = field(default_factory=dict)
    _echoes_s: list[float] = field(default_factory=list)

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Its newest metrics have come."""
        self.metrics = metrics
        self.steps = step_times(metrics) or self.steps
        self.profile = self.profile or self.steps

    def echoed(self, seconds: float) -> None:
        """An echo came; a busy drafter answers when its next step has ended, so that a step is taken off."""
        step_s = self.steps.points[-1].seconds if self.kind != "target" and self.steps else 0.0
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
        return int(self.metrics.get("num_sequences", 0))

    @property
    def num_step_tokens(self) -> int:
        """Tokens in a row that a drafter's step gives."""
        return max(1, int(self.metrics.get("num_step_tokens", 1)))

    def branches_each(self, num_sequences: int) -> int:
        """Most branches that a drafter has room for, of each of its sequences; recurrent states take a slot each."""
        rows, num_slots = max(1, num_sequences, self.num_sequences), int(self.metrics.get("num_state_slots", 0))
        room = max(0, num_slots // rows - 1) if num_slots else branch_share(rows)
        return min(branch_share(rows), room)


SETTLE_ROUNDS = 2
"""Rounds after a change of plan that are not measured: they began under the plan before."""


@dataclass
class Tracked:
    """A sequence as the controller sees it.

    Attributes:
        bound: Most draft tokens, by its request and the configuration.
        kind: Its temperature, roughly: acceptance depends on it.
        since: Rounds since the plan changed.
        seen_s: When it was last decided; None before and while a prompt was read, which says nothing of its plan.
    """

    bound: int
    kind: float
    plan: Plan = field(default_factory=Plan)
    since: int = 0
    seen_s: float | None = None
    target: str | None = None

    def follow(self, plan: Plan) -> bool:
        """It carries out a plan from now on; whether that is another."""
        if plan == self.plan:
            return False
        self.plan, self.since = plan, 0
        return True


class Controller(PlanController):
    """Chooses mode, draft length and fan-out per sequence, for the most tokens per second.

    ``decided``, ``reported`` and ``echoed`` take measurements in, ``review`` gives the plans that have changed.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._sequences: dict[str, Tracked] = {}
        self._workers: dict[str, WorkerMetrics] = {}
        self._groups: dict[str, Group] = {}
        self._unread: set[str] = set()
        self._acceptance = Acceptance()

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """A sequence has come; its first plan is what was learned before, within its request's bound."""
        most, own = self.bounds.num_draft_tokens, spec.num_speculative_tokens
        one = Tracked(most if own is None else min(own, most), kind_of(spec))
        self._sequences[seq] = one
        self._unread.add(seq)
        # Short requests end before a review places them; where there is but one target they are its.
        if len(self._groups) == 1 and self._drafters:
            one.target, group = next(iter(self._groups.items()))
            one.follow(self._plan(one, group.choice_at(self._num_able), group))
        return one.plan

    def closed(self, seq: str) -> None:
        """A sequence has ended; unknown ones are ignored."""
        self._sequences.pop(seq, None)
        self._unread.discard(seq)

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """New tokens of a sequence have come."""
        one, (num_rounds, num_accepted, num_judged) = (
            self._sequences.get(seq),
            tally(notes.provenance, notes.num_drafted),
        )
        if one is None or not num_rounds:
            return
        self._acceptance.learn((one.kind,), num_accepted, num_judged)
        group = self._groups.get(one.target or "")
        if group is not None and seq == group.probing:
            group.probed(num_rounds)
        elif group is not None and group.choice == OFF:
            group.rested(num_rounds)
        self._unread.discard(seq)
        if group is not None and one.seen_s is not None and one.since >= SETTLE_ROUNDS:
            plan = one.plan
            choice = Choice(plan.mode, plan.num_draft_tokens, plan.num_branches)
            num_tokens = num_rounds + num_accepted
            group.observe(choice, num_tokens, now_s - one.seen_s, now_s)
        one.since += num_rounds
        one.seen_s = None if self._unread else now_s

    def reported(self, worker: str, kind: WorkerKind, metrics: Mapping[str, float]) -> None:
        """A worker's newest metrics have come."""
        of_worker = self._workers.setdefault(worker, WorkerMetrics(kind))
        before = of_worker.metrics
        of_worker.reported(metrics)
        if worker in self._groups and before:  # what the first ones have counted may be of long ago
            names = "num_branch_hits", "num_branch_misses"
            hits, misses = (max(0.0, metrics.get(name, 0.0) - before.get(name, 0.0)) for name in names)
            self._groups[worker].guesses_reported(hits, misses)
            self._groups[worker].drafters.count(before, metrics)

    def echoed(self, worker: str, seconds: float) -> None:
        """A worker answered a renewal so long after it was sent."""
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
            changed.update(self._review_group(target, seqs, now_s))
        return changed

    def _review_group(self, target: str, seqs: list[str], now_s: float) -> dict[str, Plan]:
        group = self._groups.setdefault(target, Group())
        able = [seq for seq in seqs if self._sequences[seq].bound]
        # The one whose kind is known least is to probe.
        able.sort(key=lambda seq: self._acceptance.num_judged((self._sequences[seq].kind,)))
        conditions, room = self._conditions(target, len(seqs), group.guess_rate)
        rates = [self._rate(self._sequences[seq]) for seq in able]
        mean_rate = sum(rates) / len(rates) if rates else group.acceptance_rate
        longest = max((self._sequences[seq].bound for seq in able), default=0)
        branches = min(self.bounds.num_branches, room)
        bounds = replace(self.bounds, num_draft_tokens=longest, num_branches=branches)
        group.review(conditions, mean_rate, bounds, now_s)
        if conditions is not None and group.choice != OFF:
            group.named = group.drafters.choose(self._kinds, conditions.target, conditions.num_rows, now_s)
        probing, probe = None, PROBE
        if conditions is not None:
            probing = group.probe(able)
            if conditions.num_rows > 1 or PROBE.mode not in bounds.modes:
                probe = SHARED_PROBE
        plans = {
            seq: self._plan(self._sequences[seq], probe if seq == probing else group.choice, group) for seq in seqs
        }
        return {seq: plan for seq, plan in plans.items() if self._sequences[seq].follow(plan)}

    def _plan(self, one: Tracked, choice: Choice, group: Group) -> Plan:
        """The plan that carries out a choice for one sequence."""
        length = min(choice.num_draft_tokens, one.bound)
        if not length or group.conditions is None:
            return Plan()
        wait_s = SEQUENTIAL_WAIT_S if choice.mode == "sequential" else 0.0
        rate = round(10 * self._rate(one)) / 10  # one that only drifts a little is not worth a message
        # A probe may come long after the review that named them.
        named = tuple(name for name in group.named if name in self._kinds)
        return Plan(length, choice.num_branches, rate, choice.mode, wait_s, named)

    def _rate(self, one: Tracked) -> float:
        return self._acceptance.rate((one.kind,))

    def _conditions(self, target: str, num_rows: int, guess_rate: float) -> tuple[Conditions | None, int]:
        """None while too little was measured; and for how many branches of a sequence a drafter has room."""
        of_worker, known = self._workers.get(target), [one for one in self._drafters if one.steps]
        # Those of one drafter are alike; where there are several, the service's first counts as long as it is there.
        kind = min((one.kind for one in known), key=lambda kind: (kind != DRAFTER, kind), default=DRAFTER)
        known = [one for one in known if one.kind == kind]
        if of_worker is None or not of_worker.steps or not known:
            return None, 0
        drafter, num_draft_rows = known[0], max(1, -(-self._num_able // len(known)))
        num_rows, trips_s = max(num_rows, of_worker.num_sequences), of_worker.round_trip_s + drafter.round_trip_s
        found = Conditions(
            of_worker.profile,
            of_worker.steps,
            drafter.steps,
            num_rows,
            num_draft_rows,
            trips_s,
            guess_rate,
            drafter.num_step_tokens,
        )
        return found, drafter.branches_each(num_draft_rows)

    @property
    def _num_able(self) -> int:
        return sum(one.bound > 0 for one in self._sequences.values())

    @property
    def _num_without_drafter(self) -> int:
        if self._drafters:
            return 0
        able = Counter(one.target or "" for one in self._sequences.values() if one.bound)
        return sum(count for target, count in able.items() if self._would_draft(target, count))

    def _would_draft(self, target: str, num_rows: int) -> bool:
        group, of_worker = self._groups.get(target), self._workers.get(target)
        num_rows = max(num_rows, 0 if of_worker is None else of_worker.num_sequences)
        return group is None or group.would_draft(num_rows)

    @property
    def _drafters(self) -> list[WorkerMetrics]:
        return [one for one in self._workers.values() if one.kind != "target"]

    @property
    def _kinds(self) -> set[WorkerKind]:
        return {one.kind for one in self._drafters}

    def metrics(self) -> dict[str, float]:
        """Choices and estimates by name; what belongs to one target, or one mode, is named ``name/<target>``.

        ``num_without_drafter``: sequences that lack a drafter, at a load where drafts were chosen, or nothing yet.
        """
        plans = [one.plan for one in self._sequences.values()]
        drafting = [plan for plan in plans if plan.num_draft_tokens]
        count = max(1, len(drafting))
        overall = {
            "num_without_drafter": float(self._num_without_drafter),
            "planned_draft_tokens": sum(plan.num_draft_tokens for plan in drafting) / count,
            "planned_branches": sum(plan.num_branches for plan in drafting) / count,
        } | {f"planned_sequences/{mode}": float(sum(plan.mode == mode for plan in plans)) for mode in MODES}
        for target, group in self._groups.items():
            overall |= {f"{name}/{target}": value for name, value in group.metrics().items()}
        return overall
