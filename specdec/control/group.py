"""The sequences that share a target: which way of speculating they follow, and for how long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.control.choice import Bounds, arms, best, margin_over_alone, token_price
from specdec.control.estimates import Round, TrackedRate
from specdec.control.experience import Entry, Experience, Observed, load_octave
from specdec.control.limits import OFF, Arm, Conditions, Pace, expected_tokens, guess_rate_of, pace
from specdec.control.load import LoadTime
from specdec.control.probes import Probes
from specdec.control.settings import Settings

_WORSE = 0.9


@dataclass
class Allowance:
    """What trials may lose, in steps; spent where an arm turns out to be worse than the best one known.

    Attributes:
        credit: May be lost now.
        most: That can be saved up.
        ages: Steps at each octave of the load.
    """

    credit: float = 0.0
    most: float = 0.0
    ages: dict[int, float] = field(default_factory=dict)

    @property
    def share_left(self) -> float:
        """Of what can be saved up: 1 where nothing of it is spent."""
        return max(0.0, self.credit) / self.most if self.most else 0.0

    def grow(self, settings: Settings, octave: int, num_steps: float) -> None:
        """So many steps have gone by."""
        age = self.ages[octave] = self.ages.get(octave, 0.0) + num_steps
        early = math.exp(-age / settings.early_steps)
        self.most = settings.least_credit + (settings.most_credit - settings.least_credit) * early**0.5
        self.credit = min(self.credit + (settings.loss + settings.early_loss * early) * num_steps, self.most)


@dataclass
class Group:
    """The sequences of one target.

    Attributes:
        arm: What they follow.
        since_s: When that began, in time under load.
        num_rows: How many share the target's steps.
        conditions: As of the last review; None while too little is measured.
        token_price: See :func:`specdec.control.choice.token_price`.
        experience: Of arms.
        acceptance_rate: Mean of the sequences'.
        load: Time under load.
        probes: While off.
    """

    settings: Settings
    since_s: float = 0.0
    arm: Arm = OFF
    num_rows: int = 0
    conditions: Conditions | None = None
    token_price: float = 0.0
    experience: Experience = field(default_factory=Experience)
    observed: Observed = field(default_factory=Observed)
    acceptance_rate: float = 0.7
    num_trials: int = 0
    load: LoadTime = field(default_factory=LoadTime)
    probes: Probes = field(init=False)
    _mean_length: float = 0.0
    _allowance: Allowance = field(default_factory=Allowance)
    _forecasts: tuple[Conditions, float, dict[Arm, Pace]] | None = None
    _longest_round_s: float = math.inf
    _reviewed_s: float = 0.0
    _chosen_s: float = -math.inf
    _chosen_for: tuple[int, Bounds] | None = None
    _reported_arm: Arm = OFF
    _on_trial: bool = False
    _was_seen: bool = False
    _num_steps: float = 0.0
    _is_probing: bool = False

    def __post_init__(self) -> None:
        self.arm = self.settings.first_arm
        self.probes = Probes(self.settings)

    def heard(self, arm: Arm, rounds: Sequence[Round], seconds: float, now_s: float, *, is_settled: bool) -> None:
        """A sequence that may draft had these rounds in so many seconds, under an arm; settled ones are measured.

        Where no drafter is there, or its times are not known, rounds are not the arm's, and the time does not count.
        """
        if self.conditions is None:
            return
        # Reading another's prompt, or being preempted, is not the arm's doing.
        seconds = min(seconds, len(rounds) * self._longest_round_s + 0.05)
        self.load.heard(seconds, now_s)
        if arm != self.arm or not is_settled:
            return
        one = self.observed
        for num_drafted, num_accepted in rounds:
            one.lengths[num_drafted] += 1
            one.num_tokens += 1 + num_accepted
        one.seconds += seconds

    def rest(self, now_s: float) -> None:
        """Nobody is there who may draft. What was measured until now is of the load that has ended."""
        if self.conditions is not None:
            self._learn(self.conditions, now_s)
        self.num_rows = 0

    def guesses_from(self, guesses: TrackedRate, hits: float, misses: float, acceptance_rate: float) -> TrackedRate:
        """What branch hits and misses since the last report say of the draft's guesses; nothing if the arm changed."""
        length = round(self.observed.mean_length or self._mean_length)
        arm, self._reported_arm = self._reported_arm, self.arm
        if self.arm.kind != "outcomes" or not length or arm != self.arm:
            return guesses
        total = hits + misses
        rate = guess_rate_of(hits / total, round(acceptance_rate * 50) / 50, length, self.arm.num_branches)
        return guesses.add(rate * total, total)

    def review(
        self, conditions: Conditions | None, acceptance_rates: Sequence[float], bounds: Bounds, now_s: float
    ) -> None:
        """Choose the arm anew; the rates are those of the sequences that may draft."""
        if not acceptance_rates:
            self.rest(now_s)
            return
        self.conditions = conditions
        if conditions is None:
            self.num_rows = max(self.num_rows, len(acceptance_rates))
            self.observed, self._was_seen = Observed(), False
            return
        self.num_rows = conditions.num_rows
        self.acceptance_rate = sum(acceptance_rates) / len(acceptance_rates)
        elapsed = (self.load.now_s - self._reviewed_s) / conditions.target_s(0)
        self._reviewed_s = self.load.now_s
        self._allowance.grow(self.settings, load_octave(self.num_rows), elapsed)
        self._learn(conditions, now_s)
        if not self._has_chosen_lately(bounds):
            self._chosen_s, self._chosen_for = self.load.now_s, (self.num_rows, bounds)
            scored, lucky = self._scores(self._ways(bounds, conditions), conditions, now_s)
            if self._on_trial:
                self._allowance.credit -= elapsed * self._price(self.arm, scored)
            if not self._goes_on(scored, lucky):
                self._choose(scored, lucky, conditions, now_s)
        present = pace(self.arm, conditions, self.acceptance_rate)
        self._longest_round_s = max(4 * conditions.target_s(self.arm.num_draft_tokens), 2 * present.round_s)
        # The arm was chosen for the average sequence, whatever the slope just there: it is for those that are worse.
        price = token_price(self.arm, conditions, present)
        self.token_price = min(price, (_WORSE * self.acceptance_rate) ** self.arm.num_draft_tokens)

    def _has_chosen_lately(self, bounds: Bounds) -> bool:
        """Whether the arm was chosen so short ago, and is so well measured, that to choose is not worth the time."""
        if self._on_trial or self._num_steps < self.settings.trial_steps:
            return False
        return (self.num_rows, bounds) == self._chosen_for and self.load.now_s < self._chosen_s + self.settings.rest_s

    def _choose(
        self, scored: Mapping[Arm, float], lucky: Mapping[Arm, float], conditions: Conditions, now_s: float
    ) -> None:
        chosen = best(self._promised(scored), self.arm, self.settings.hysteresis)
        trial = self._trial(chosen, scored, lucky)
        self._on_trial = trial is not None
        self.num_trials += self._on_trial
        chosen = chosen if trial is None else trial
        if chosen != self.arm:
            self._change(chosen, conditions, now_s)
        if self.arm != OFF and trial is None:
            self.probes.reset()

    def _scores(
        self, ways: Sequence[Arm], conditions: Conditions, now_s: float
    ) -> tuple[dict[Arm, float], dict[Arm, float]]:
        """Tokens per second of a sequence, by arm: to be expected, and with luck.

        Arms that draft in vain are left out, and those that would, if each of their drafts cost nothing: where target
        alone takes longer than its steps, their formulas look better. No luck verifies faster than the target steps
        without any draft.
        """
        rate = round(self.acceptance_rate, 2)
        if self._forecasts is None or self._forecasts[:2] != (conditions, rate):
            self._forecasts = conditions, rate, {}
        known = self._forecasts[2]
        known.update({arm: pace(arm, conditions, rate) for arm in ways if arm not in known})
        at_best = {arm: expected_tokens(rate, arm.num_draft_tokens) for arm in ways}
        margin = margin_over_alone(self.settings.hysteresis)
        may_gain = {arm for arm in ways if known[arm].num_draft_tokens > 0 and at_best[arm] > margin}
        ways = [arm for arm in ways if arm in may_gain or arm in (OFF, self.arm)]

        def predicted(entry: Entry) -> float:
            then = conditions.at_load(entry.num_rows, entry.num_draft_rows)
            return pace(entry.arm, then, entry.acceptance_rate).tokens_per_s

        beliefs = self.experience.beliefs(ways, conditions, rate, now_s, predicted)
        scored = {arm: known[arm].tokens_per_s * math.exp(belief.mean) for arm, belief in beliefs.items()}
        step_s = conditions.target_s(0)
        luck = self.settings.curiosity * (1 + self._allowance.share_left)
        most = {arm: at_best[arm] / step_s for arm in ways}
        most[OFF] = math.inf  # the step was measured beside drafts, perhaps
        lucky = {
            arm: max(scored[arm], min(scored[arm] * math.exp((luck + (arm == OFF)) * belief.error), most[arm]))
            for arm, belief in beliefs.items()
        }
        return scored, lucky

    def _promised(self, scored: Mapping[Arm, float]) -> dict[Arm, float]:
        """The scores; an arm that was not tried, and costs more to find out than can be saved, has to promise more."""
        tried = {arm for arm, octave in self.experience.entries if octave == load_octave(self.num_rows)}
        promised = dict(scored)
        for arm in scored.keys() - tried:
            if scored[arm] > scored.get(self.arm, 0.0):
                cost = self._trial_steps(arm) * self.settings.least_price / self._allowance.most
                promised[arm] /= 1 + (self.settings.hysteresis * cost if cost > 1 else 0.0)
        return promised

    def _ways(self, bounds: Bounds, conditions: Conditions) -> list[Arm]:
        """The present arm, and all whose draft steps are not much larger than any that was measured."""
        seen = max(point.rows for point in conditions.draft.points)
        most = max(self.settings.most_growth * seen, self.settings.free_rows) / conditions.num_draft_rows
        return [arm for arm in arms(bounds) if arm == self.arm or 1 + arm.num_branches <= most]

    def _goes_on(self, scored: Mapping[Arm, float], lucky: Mapping[Arm, float]) -> bool:
        """Whether too little was measured of the present arm, which may still turn out to be the best, to leave it."""
        is_spent = self._allowance.credit < -self.settings.most_credit
        if self.arm not in lucky or self._num_steps >= self.settings.trial_steps or is_spent:
            return False
        return not self._was_seen or lucky[self.arm] > max(scored.values())

    def _learn(self, conditions: Conditions, now_s: float) -> None:
        """Take in what was measured of the present arm."""
        one, was_seen = self.observed, self._was_seen
        self._was_seen = conditions.has_seen(self.arm) or self.load.now_s >= self.since_s + self.settings.unseen_s
        # Its plans were made for other times than its steps take, or its steps are longer for the sake of a probe.
        if self._is_probing or not (was_seen and self._was_seen):
            self.observed = Observed()
            return
        if one.num_rounds < self.settings.settle_rounds or not one.seconds:
            return
        expected = one.expected_tokens(self.acceptance_rate)
        rows, draft_rows, rate = conditions.num_rows, conditions.num_draft_rows, self.acceptance_rate
        figures = one.num_rounds, one.seconds, expected, one.num_tokens
        entry = Entry(self.arm, rows, draft_rows, rate, *figures, now_s, dict(one.lengths))
        self.experience = self.experience.add(entry)
        self._num_steps += entry.num_steps
        self._mean_length = one.mean_length
        self.observed = Observed()

    def _trial(self, chosen: Arm, scored: Mapping[Arm, float], lucky: Mapping[Arm, float]) -> Arm | None:
        """The arm that might be the best by the most, where finding out costs no more than may be lost.

        Drafting has to gain something for it; target alone is tried as soon as it might be as good. What may be lost is
        saved up for the first of them, but one that costs more than can be saved does not keep others from their turn.
        """
        margin = margin_over_alone(self.settings.hysteresis)
        worth = {arm: pace if arm == OFF else pace / margin for arm, pace in lucky.items()}
        for arm in sorted(worth, key=worth.__getitem__, reverse=True):
            if arm == chosen or worth[arm] <= scored[chosen]:
                break
            price = self._trial_steps(arm) * self._price(arm, scored)
            if price <= self._allowance.most:
                return arm if price <= self._allowance.credit else None
        return None

    def _trial_steps(self, arm: Arm) -> float:
        """Steps without drafts in the time that a trial takes: its rounds, and what goes by until they count."""
        assert self.conditions is not None
        round_s = pace(arm, self.conditions, self.acceptance_rate).round_s
        unseen_s = 0.0 if self.conditions.has_seen(arm) else self.settings.unseen_s / 2
        num_rounds = self.settings.trial_steps + self.settings.settle_rounds
        return (num_rounds * round_s + unseen_s) / self.conditions.target_s(0)

    def _price(self, arm: Arm, scored: Mapping[Arm, float]) -> float:
        """Share of the time that an arm is taken to lose against the best; drafting in vain has a price, too."""
        most = max(scored.values())  # an arm that is out of bounds by now is not among them
        return max(self.settings.least_price, 1 - scored.get(arm, most) / most)

    def _change(self, arm: Arm, conditions: Conditions, now_s: float) -> None:
        if arm == OFF:
            self.probes.plan(now_s, self.load.now_s, conditions)
        self.arm, self.since_s = arm, self.load.now_s
        self._was_seen = conditions.has_seen(arm)
        self.observed, self._num_steps, self._mean_length = Observed(), 0.0, 0.0

    def probed(self, seqs: Sequence[str], now_s: float) -> Sequence[str]:
        """While off, the sequences that draft a little now, so that better times are noticed.

        Where a drafter has no times yet, as one that was started anew, they draft until it has: it makes no step else.
        """
        self._is_probing = False
        if self.arm != OFF or not seqs:
            return ()
        self._is_probing = self.conditions is None or (
            not self._on_trial and self.probes.is_on(now_s, self.load.now_s, self.conditions, len(seqs))
        )
        return self.probes.some_of(seqs) if self._is_probing else ()

    def figures(self) -> dict[str, float]:
        """Choice and estimates, by name."""
        figures = {"planned_arm_draft_tokens": float(self.arm.num_draft_tokens)}
        if self.conditions is not None:
            figures["estimated_target_step_seconds"] = self.conditions.target_s(0)
            figures["estimated_verify_step_seconds"] = self.conditions.target_s(self.arm.num_draft_tokens)
            figures["estimated_draft_step_seconds"] = self.conditions.draft_s(1 + self.arm.num_branches)
            figures["estimated_round_trip_seconds"] = self.conditions.round_trip_s
        return figures
