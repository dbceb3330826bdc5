"""The sequences that share a target: which way of speculating they follow, and for how long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.control.choice import Bounds, Corrections, arms, best, scores, token_price
from specdec.control.estimates import Round, TrackedRate
from specdec.control.limits import OFF, Arm, Conditions, Pace, Style, expected_tokens, guess_rate_of, pace

_WORSE = 0.9
_FIRST_ARM, _PROBE_ARM = Arm("overlap", 4), Arm("overlap", 2)


@dataclass(frozen=True)
class Settings:
    """How the controller proceeds.

    Attributes:
        first_arm: Before anything was measured.
        probe_arm: What probing sequences do while the others are off.
        hysteresis: How much better another arm must be, as a share of the present one.
        trial_share: A style that was never measured is tried if its formula promises this share of the best.
        trial_rounds: Rounds per sequence of a trial.
        trial_s: Longest trial.
        trial_loss: A trial ends at once when an arm turns out to be worse than the best by this share.
        most_growth: An arm is considered only if its steps are at most so many times larger than any that was seen, or
            have no more than ``free_rows`` rows.
        settle_rounds: Rounds after a change of plan that are not measured.
        probe_rounds: Rounds of a probe.
        probe_cost: Most of the time that probing may cost, as a share.
        probe_share: Sequences that probe at a time, as a share; at least one does.
        probe_first_s: Time until the first probe; it doubles with each probe in vain, up to ``probe_last_s``.
        round_trip_s: Assumed until it is measured.
    """

    first_arm: Arm = _FIRST_ARM
    probe_arm: Arm = _PROBE_ARM
    hysteresis: float = 0.03
    trial_share: float = 0.9
    trial_rounds: int = 24
    trial_s: float = 2.0
    trial_loss: float = 0.2
    most_growth: float = 4.0
    free_rows: int = 34
    settle_rounds: int = 3
    probe_rounds: int = 24
    probe_cost: float = 0.01
    probe_share: float = 0.05
    probe_first_s: float = 2.0
    probe_last_s: float = 60.0
    round_trip_s: float = 0.004


@dataclass
class Observed:
    """What was measured of the present arm.

    Attributes:
        lengths: Rounds by number of draft tokens.
        seconds: Of all rounds together.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def num_rounds(self) -> int:
        """All rounds, with and without a draft."""
        return self.lengths.total()

    @property
    def mean_length(self) -> float:
        """Draft tokens of the rounds that had any; 0 where none had."""
        drafts = self.num_rounds - self.lengths[0]
        return sum(length * count for length, count in self.lengths.items()) / drafts if drafts else 0.0

    def pace(self, acceptance_rate: float) -> Pace:
        """The pace with the tokens that drafts of such lengths give on average.

        Not the tokens that came: at one sequence chance moves them by tens of percent for minutes, and the acceptance
        rate is known better than that.
        """
        rounds = self.num_rounds
        tokens = sum(count * expected_tokens(acceptance_rate, length) for length, count in self.lengths.items())
        drafted = sum(length * count for length, count in self.lengths.items())
        return Pace(tokens / rounds, self.seconds / rounds, drafted / rounds)


@dataclass
class Group:
    """The sequences of one target.

    Attributes:
        arm: What they follow.
        num_rows: How many share the target's steps.
        conditions: As of the last review; None while too little is measured.
        token_price: See :func:`specdec.control.choice.token_price`.
    """

    settings: Settings
    since_s: float
    arm: Arm = OFF
    num_rows: int = 0
    conditions: Conditions | None = None
    token_price: float = 0.0
    corrections: Corrections = field(default_factory=Corrections)
    observed: Observed = field(default_factory=Observed)
    acceptance_rate: float = 0.7
    _tried: set[tuple[Style, int]] = field(default_factory=set)
    _on_trial: bool = False
    _was_seen: bool = False
    _num_rounds: int = 0
    _probe_from_s: float = math.inf
    _probe_until_rounds: int = 0
    _probe_interval_s: float = 0.0

    def __post_init__(self) -> None:
        self.arm = self.settings.first_arm

    def observe(self, arm: Arm, rounds: Sequence[Round], seconds: float) -> None:
        """A settled sequence had these rounds in so many seconds."""
        if arm != self.arm:
            return
        if self.conditions is not None:  # reading another's prompt, or being preempted, is not the arm's doing
            seconds = min(seconds, 4 * len(rounds) * self.conditions.target_s(arm.num_draft_tokens) + 0.05)
        self.observed.lengths.update(drafted for drafted, _ in rounds)
        self.observed.seconds += seconds
        self._num_rounds += len(rounds)

    def guesses_from(self, guesses: TrackedRate, hits: float, misses: float, acceptance_rate: float) -> TrackedRate:
        """What branch hits and misses say of the draft's guesses."""
        length = round(self.observed.mean_length)
        if self.arm.kind != "outcomes" or not length:
            return guesses
        total = hits + misses
        rate = guess_rate_of(hits / total, round(acceptance_rate * 50) / 50, length, self.arm.num_branches)
        return guesses.add(rate * total, total)

    def review(
        self, conditions: Conditions | None, acceptance_rates: Mapping[float, int], bounds: Bounds, now_s: float
    ) -> None:
        """Choose the arm anew."""
        self.conditions = conditions
        if conditions is None or not acceptance_rates:
            self.num_rows = max(self.num_rows, sum(acceptance_rates.values()))
            return
        self.num_rows = conditions.num_rows
        count = sum(acceptance_rates.values())
        self.acceptance_rate = sum(rate * n for rate, n in acceptance_rates.items()) / count
        self._learn(conditions)
        ways = [arm for arm in arms(bounds) if arm == self.arm or self._is_near(arm, conditions)]
        scored = scores(ways, conditions, acceptance_rates, self.corrections)
        if self._on_trial and self._goes_on(scored, count, conditions, now_s):
            return
        self._on_trial = False
        chosen = self._trial(scored, conditions) or best(scored, self.arm, self.settings.hysteresis)
        if chosen != self.arm:
            self._change(chosen, now_s)
        price = token_price(self.arm, conditions, pace(self.arm, conditions, self.acceptance_rate))
        # The arm was chosen for the average sequence, whatever the slope just there: it is for those that are worse.
        self.token_price = min(price, (_WORSE * self.acceptance_rate) ** self.arm.num_draft_tokens)

    def _is_near(self, arm: Arm, conditions: Conditions) -> bool:
        """Whether an arm's draft steps are not much larger than any that was measured."""
        rows = conditions.num_draft_rows * (1 + arm.num_branches)
        seen = max(point.rows for point in conditions.draft.points)
        return rows <= max(self.settings.most_growth * seen, self.settings.free_rows)

    def _goes_on(self, scored: Mapping[Arm, float], count: int, conditions: Conditions, now_s: float) -> bool:
        """Whether a trial is to be continued."""
        settings = self.settings
        if self._num_rounds >= settings.trial_rounds * count or now_s >= self.since_s + settings.trial_s:
            return False
        is_bad = scored.get(self.arm, 0.0) < max(scored.values()) * (1 - settings.trial_loss)
        return not (is_bad and conditions.has_seen(self.arm))

    def _learn(self, conditions: Conditions) -> None:
        """Compare what was measured of the present arm with its formula."""
        one, was_seen = self.observed, self._was_seen
        self._was_seen = conditions.has_seen(self.arm)
        if not (was_seen and self._was_seen):  # its plans were made for other times than its steps take
            self.observed = Observed()
            return
        if one.num_rounds < self.settings.settle_rounds or not one.seconds:
            return
        measured = self.observed.pace(self.acceptance_rate).tokens_per_s
        predicted = pace(self.arm, conditions, self.acceptance_rate).tokens_per_s
        log_ratio = max(-1.5, min(1.5, math.log(measured / predicted)))
        self.corrections = self.corrections.add(self.arm, self.observed.num_rounds, log_ratio)
        self.observed = Observed()

    def _trial(self, scored: Mapping[Arm, float], conditions: Conditions) -> Arm | None:
        """An arm of a style that was never measured at this load, where it might be the best."""
        octave = round(math.log2(max(1, conditions.num_rows)))
        if conditions.target.has_seen(conditions.num_rows, conditions.num_rows):
            self._tried.add((OFF.style, octave))
        self._tried.add((self.arm.style, octave))
        least = max(scored.values()) * self.settings.trial_share
        for arm in sorted(scored, key=scored.__getitem__, reverse=True):
            if (arm.style, octave) not in self._tried and (arm == OFF or scored[arm] >= least):
                self._tried.add((arm.style, octave))
                self._on_trial = True
                return arm
        return None

    def _change(self, arm: Arm, now_s: float) -> None:
        if arm == OFF and self.conditions is not None:
            self._probe_interval_s = self._probe_interval_s or self.settings.probe_first_s
            self._probe_from_s = now_s + self._probe_interval_s
        self.arm, self.since_s = arm, now_s
        self._was_seen = self.conditions is not None and self.conditions.has_seen(arm)
        self.observed, self._num_rounds = Observed(), 0

    def probed(self, seqs: Sequence[str], now_s: float) -> Sequence[str]:
        """While off, the sequences that draft a little now, so that better times are noticed."""
        if self.arm != OFF or self.conditions is None or not seqs or now_s < self._probe_from_s:
            return ()
        count = max(1, round(self.settings.probe_share * len(seqs)))
        rows, drafted = self.num_rows, count * self.settings.probe_arm.num_draft_tokens
        step_s = self.conditions.target_s(0)
        if now_s >= self._probe_from_s + self.settings.probe_rounds * step_s:
            loss = self.conditions.target.at(rows, rows + drafted) / step_s - 1
            least_s = loss * self.settings.probe_rounds * step_s / self.settings.probe_cost
            self._probe_interval_s = max(least_s, min(2 * self._probe_interval_s, self.settings.probe_last_s))
            self._probe_from_s = now_s + self._probe_interval_s
            return ()
        turn = int(self._probe_from_s * 1000) % len(seqs)
        return [*seqs[turn:], *seqs[:turn]][:count]

    def figures(self) -> dict[str, float]:
        """Choice and estimates, by name."""
        figures = {"planned_arm_draft_tokens": float(self.arm.num_draft_tokens)}
        if self.conditions is not None:
            figures["estimated_target_step_seconds"] = self.conditions.target_s(0)
            figures["estimated_verify_step_seconds"] = self.conditions.target_s(self.arm.num_draft_tokens)
            figures["estimated_draft_step_seconds"] = self.conditions.draft_s(1 + self.arm.num_branches)
            figures["estimated_round_trip_seconds"] = self.conditions.round_trip_s
        return figures
