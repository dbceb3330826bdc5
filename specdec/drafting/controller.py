"""The controller: chooses the plan of each sequence that has a draft model on a device of its own.

It predicts the tokens per second of each choice from measured step times and acceptance
(:mod:`specdec.drafting.modes`), corrects the predictions of each mode by what sequences under it measured, and follows
the best one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdec.core.messages import Notes, Plan
from specdec.core.params import SequenceSpec
from specdec.core.types import SpeculationMode
from specdec.drafting.branches import branch_share
from specdec.drafting.length import Acceptance, DecayedRate, StepTimes, best_choice, kind_of, step_times, tally
from specdec.drafting.modes import MODES, OFF, Bounds, Choice, Conditions, pace, paces
from specdec.drafting.plans import SEQUENTIAL_WAIT_S, Placements, PlanController, WorkerKind

CAUTION = 0.95
"""A mode that was never measured is taken to give this part of its prediction."""
PRIOR_TOKENS, AGE_S = 8.0, 300.0
"""A correction trusts its prior like this many tokens of each sequence; without news it counts 1/e after ``AGE_S``."""
SETTLE_ROUNDS = 2
"""Rounds after a change of plan that are not measured: they began under the plan before."""
PROBE_TOKENS, PROBE_ROUNDS, PROBE_SHARE = 2, 8, 0.01
"""While drafts are off, one sequence drafts a little for some rounds, and then only that part of all rounds drafts."""


@dataclass
class Correction:
    """Measured over predicted tokens of a mode."""

    ratio: DecayedRate = field(default_factory=DecayedRate)
    measured_s: float = 0.0

    def measure(self, num_tokens: float, num_predicted: float, now_s: float) -> None:
        """Count tokens of one sequence."""
        self.ratio, self.measured_s = self._aged(now_s).add(num_tokens, num_predicted), now_s

    def value(self, prior: float, now_s: float) -> float:
        """Return the correction; near ``prior`` until it is measured, and when that is long ago."""
        return self._aged(now_s).rate(prior, PRIOR_TOKENS)

    def _aged(self, now_s: float) -> DecayedRate:
        return self.ratio.times(math.exp((self.measured_s - now_s) / AGE_S))


@dataclass
class Kind:
    """Requests of one temperature on one target: what is chosen for them, by load.

    Attributes:
        choice: Followed at the present load.
        by_load: Followed last, by the number of rows in octaves.
        rest_rounds: Rounds without a draft until the next probe.
        probing: The sequence that probes, and the rounds that it had.
    """

    choice: Choice = OFF
    by_load: dict[int, Choice] = field(default_factory=dict)
    rest_rounds: float = 0.0
    probing: str | None = None
    probe_rounds: int = 0

    def probe(self, able: Sequence[str]) -> str | None:
        """Return the sequence that drafts a little to learn, if drafts are off and it is time."""
        if self.choice != OFF or self.probing not in able or self.probe_rounds >= PROBE_ROUNDS:
            self.probing, self.probe_rounds = None, 0
        if self.choice == OFF and able and self.probing is None and self.rest_rounds <= 0:
            self.probing = able[0]
        return self.probing

    def count_rounds(self, seq: str, num_rounds: int) -> None:
        """Count a sequence's rounds while drafts are off."""
        if seq == self.probing:
            self.probe_rounds += num_rounds
            self.rest_rounds += num_rounds / PROBE_SHARE
        elif self.choice == OFF:
            self.rest_rounds -= num_rounds


@dataclass
class Group:
    """The sequences of one target.

    Attributes:
        conditions: As of the last review; None while too little is measured.
        kinds: By the requests' temperature.
        corrections: By mode.
        gains: Of each kind, the best score of any draft over that of plain decoding, as of the last review.
    """

    conditions: Conditions | None = None
    kinds: defaultdict[float, Kind] = field(default_factory=lambda: defaultdict(Kind))
    corrections: defaultdict[SpeculationMode, Correction] = field(default_factory=lambda: defaultdict(Correction))
    gains: dict[float, float] = field(default_factory=dict)

    def review(self, kind: float, acceptance_rate: float, bounds: Bounds, now_s: float) -> None:
        """Choose again for the requests of a kind."""
        one, conditions = self.kinds[kind], self.conditions
        if conditions is None or not bounds.num_draft_tokens:
            one.choice = OFF
            return
        load = conditions.num_rows.bit_length()
        scores = {
            choice: predicted * self.correction(choice.mode, now_s)
            for choice, predicted in paces(conditions, acceptance_rate, bounds).items()
        }
        one.choice = one.by_load[load] = best_choice(scores, OFF, one.by_load.get(load, OFF))
        self.gains[kind] = max(score for choice, score in scores.items() if choice != OFF) / scores[OFF]
        if one.choice != OFF:
            one.rest_rounds = 0.0

    def correction(self, mode: SpeculationMode, now_s: float) -> float:
        """Return measured over predicted tokens; what slows plain decoding down is expected to slow all modes."""
        plain = self.corrections["off"].value(1.0, now_s)
        return plain if mode == "off" else self.corrections[mode].value(CAUTION * min(1.0, plain), now_s)

    def measure(self, choice: Choice, acceptance_rate: float, num_tokens: int, seconds: float, now_s: float) -> None:
        """A sequence under a choice had ``num_tokens`` in ``seconds``."""
        if self.conditions is None:
            return
        num_rows, predicted = self.conditions.num_rows, pace(choice, self.conditions, acceptance_rate)
        num_predicted = min(seconds * predicted, 4.0 * num_tokens)  # a preemption is not the mode's doing
        self.corrections[choice.mode].measure(num_tokens / num_rows, num_predicted / num_rows, now_s)


@dataclass
class WorkerMetrics:
    """What a worker reported last, and the step times that it reported first: those of its profile."""

    kind: WorkerKind
    steps: StepTimes = field(default_factory=StepTimes)
    profile: StepTimes = field(default_factory=StepTimes)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Take its newest metrics."""
        self.metrics = metrics
        self.steps = step_times(metrics) or self.steps
        self.profile = self.profile or self.steps

    @property
    def num_sequences(self) -> int:
        """Sequences it holds, other routers' among them."""
        return int(self.metrics.get("num_sequences", 0))

    @property
    def num_step_tokens(self) -> int:
        """Tokens in a row that a drafter's step gives."""
        return max(1, int(self.metrics.get("num_step_tokens", 1)))

    def max_branches(self, num_sequences: int) -> int:
        """Return the branches that a drafter has room for in each of its sequences; each takes a recurrent state."""
        rows, num_slots = max(1, num_sequences, self.num_sequences), int(self.metrics.get("num_state_slots", 0))
        room = max(0, num_slots // rows - 1) if num_slots else branch_share(rows)
        return min(branch_share(rows), room)


@dataclass
class Tracked:
    """A sequence as the controller sees it.

    Attributes:
        bound: Most draft tokens, by its request and the configuration.
        kind: Its temperature, rounded.
        num_rounds: Rounds since its plan changed.
        decided_s: When it was last decided; None before that and while any prompt is read, which slows every mode.
    """

    bound: int
    kind: float
    plan: Plan = field(default_factory=Plan)
    num_rounds: int = 0
    decided_s: float | None = None
    target: str | None = None

    def follow(self, plan: Plan) -> bool:
        """Carry out a plan from now on; return whether it is another one."""
        if plan == self.plan:
            return False
        self.plan, self.num_rounds = plan, 0
        return True


class Controller(PlanController):
    """Chooses mode, draft length and fan-out of each sequence for the most tokens per second."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._sequences: dict[str, Tracked] = {}
        self._workers: dict[str, WorkerMetrics] = {}
        self._groups: defaultdict[str, Group] = defaultdict(Group)
        self._unread: set[str] = set()
        self._acceptance = Acceptance()

    def opened(self, seq: str, spec: SequenceSpec) -> Plan:
        """Return the first plan of a new sequence: what was learned before, within its request's bound."""
        bound, own = self.bounds.num_draft_tokens, spec.num_speculative_tokens
        sequence = self._sequences[seq] = Tracked(bound if own is None else min(own, bound), kind_of(spec))
        self._unread.add(seq)
        # Short requests end before a review places them; if there is one target they are its.
        if len(self._groups) == 1 and self._drafters:
            sequence.target, group = next(iter(self._groups.items()))
            kind = group.kinds[sequence.kind]
            choice = kind.by_load.get(self._num_able.bit_length(), kind.choice)
            sequence.follow(self._plan(sequence, choice, group))
        return sequence.plan

    def closed(self, seq: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._sequences.pop(seq, None)
        self._unread.discard(seq)

    def decided(self, seq: str, notes: Notes, now_s: float) -> None:
        """Learn from new tokens of a sequence."""
        sequence = self._sequences.get(seq)
        num_rounds, num_accepted, num_judged = tally(notes.provenance, notes.num_drafted)
        if sequence is None or not num_rounds:
            return
        self._acceptance.learn(sequence.kind, num_accepted, num_judged)
        self._unread.discard(seq)
        group = self._groups.get(sequence.target or "")
        if group is not None:
            group.kinds[sequence.kind].count_rounds(seq, num_rounds)
            if sequence.decided_s is not None and sequence.num_rounds >= SETTLE_ROUNDS:
                choice = Choice(sequence.plan.mode, sequence.plan.num_draft_tokens, sequence.plan.num_branches)
                num_tokens, seconds = num_rounds + num_accepted, now_s - sequence.decided_s
                if seq != group.kinds[sequence.kind].probing:
                    group.measure(choice, self._acceptance.rate(sequence.kind), num_tokens, seconds, now_s)
        sequence.num_rounds += num_rounds
        sequence.decided_s = None if self._unread else now_s

    def reported(self, worker: str, kind: WorkerKind, metrics: Mapping[str, float]) -> None:
        """Take a worker's newest metrics."""
        self._workers.setdefault(worker, WorkerMetrics(kind)).report(metrics)

    def lost(self, worker: str) -> None:
        """Forget a worker, and what was learned of it."""
        self._workers.pop(worker, None)
        self._groups.pop(worker, None)

    def review(self, placements: Placements, now_s: float) -> dict[str, Plan]:
        """Choose again; return the plans that have changed, by sequence."""
        members: defaultdict[str, list[str]] = defaultdict(list)
        for seq, (target, _) in placements.items():
            if seq in self._sequences:
                self._sequences[seq].target = target
                members[target].append(seq)
        changed: dict[str, Plan] = {}
        for target, seqs in members.items():
            changed |= self._review_group(target, seqs, now_s)
        return changed

    def _review_group(self, target: str, seqs: list[str], now_s: float) -> dict[str, Plan]:
        group = self._groups[target]
        group.conditions, room = self._conditions(target, len(seqs))
        by_kind: defaultdict[float, list[str]] = defaultdict(list)
        for seq in seqs:
            by_kind[self._sequences[seq].kind].append(seq)
        changed: dict[str, Plan] = {}
        for kind, members in by_kind.items():
            able = [seq for seq in members if self._sequences[seq].bound]
            longest = max((self._sequences[seq].bound for seq in able), default=0)
            branches = min(self.bounds.num_branches, room)
            bounds = replace(self.bounds, num_draft_tokens=longest, num_branches=branches)
            group.review(kind, self._acceptance.rate(kind), bounds, now_s)
            probing = group.kinds[kind].probe(able) if group.conditions is not None else None
            for seq in members:
                sequence = self._sequences[seq]
                choice = self._probe_choice(len(seqs)) if seq == probing else group.kinds[kind].choice
                if sequence.follow(self._plan(sequence, choice, group)):
                    changed[seq] = sequence.plan
        return changed

    def _probe_choice(self, num_rows: int) -> Choice:
        """Return a probe's choice: beside other rows it does not wait for its draft, as it would miss their step."""
        mode: SpeculationMode = "sequential" if num_rows == 1 and "sequential" in self.bounds.modes else "overlap"
        return Choice(mode, PROBE_TOKENS)

    def _plan(self, sequence: Tracked, choice: Choice, group: Group) -> Plan:
        """Return the plan that carries out a choice for one sequence."""
        if choice == OFF or group.conditions is None:
            return Plan()
        # Drafted ahead, a chain is as long as time allows, in some rounds longer than in the mean one of the formula.
        length = choice.num_draft_tokens + (choice.mode != "sequential")
        length = min(length, sequence.bound, self.bounds.num_draft_tokens)
        wait_s = SEQUENTIAL_WAIT_S if choice.mode == "sequential" else 0.0
        rate = round(10 * self._acceptance.rate(sequence.kind)) / 10  # a small drift is not worth a message
        return Plan(length, choice.num_branches, rate, choice.mode, wait_s)

    def _conditions(self, target: str, num_rows: int) -> tuple[Conditions | None, int]:
        """Return the conditions, None while too little is measured, and the branches a sequence has room for."""
        worker, drafters = self._workers.get(target), [drafter for drafter in self._drafters if drafter.steps]
        if worker is None or not worker.steps or not drafters:
            return None, 0
        drafter, num_draft_rows = drafters[0], max(1, -(-self._num_able // len(drafters)))
        num_rows = max(num_rows, worker.num_sequences)
        steps = worker.profile, worker.steps, drafter.steps
        conditions = Conditions(*steps, num_rows, num_draft_rows, drafter.num_step_tokens)
        return conditions, drafter.max_branches(num_draft_rows)

    @property
    def _num_able(self) -> int:
        return sum(sequence.bound > 0 for sequence in self._sequences.values())

    @property
    def _num_without_drafter(self) -> int:
        """Sequences that lack a drafter, at a load at which drafts were chosen, or nothing yet."""
        if self._drafters:
            return 0
        able = Counter((one.target or "", one.kind) for one in self._sequences.values() if one.bound)
        return sum(count for (target, kind), count in able.items() if self._would_draft(target, kind))

    def _would_draft(self, target: str, kind: float) -> bool:
        if target not in self._groups:
            return True
        worker = self._workers.get(target)
        rows = sum(one.target == target for one in self._sequences.values())
        num_rows = max(rows, 0 if worker is None else worker.num_sequences)
        return self._groups[target].kinds[kind].by_load.get(num_rows.bit_length()) != OFF

    @property
    def _drafters(self) -> list[WorkerMetrics]:
        return [worker for worker in self._workers.values() if worker.kind != "target"]

    def metrics(self) -> dict[str, float]:
        """Return choices and estimates by name; those of one target, or mode, are named ``name/<target>``.

        ``num_without_drafter``: sequences that lack a drafter, at a load at which drafts were chosen, or nothing yet.
        ``measured_gain``: tokens per second of the best draft over those of plain decoding.
        """
        plans = [sequence.plan for sequence in self._sequences.values()]
        drafting = [plan for plan in plans if plan.num_draft_tokens]
        count = max(1, len(drafting))
        gains = {
            f"measured_gain/{target}": max(group.gains.values())
            for target, group in self._groups.items()
            if group.gains
        }
        return (
            {
                "num_without_drafter": float(self._num_without_drafter),
                "planned_draft_tokens": sum(plan.num_draft_tokens for plan in drafting) / count,
                "planned_branches": sum(plan.num_branches for plan in drafting) / count,
            }
            | {f"planned_sequences/{mode}": float(sum(plan.mode == mode for plan in plans)) for mode in MODES}
            | gains
        )
