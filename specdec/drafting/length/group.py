"""The sequences that share a target: which speculation mode they follow, and what was learned of each mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.core.types import SpeculationMode
from specdec.drafting.length.estimates import PRIOR_RATE, PRIOR_TRIALS, DecayedRate
from specdec.drafting.length.modes import OFF, Bounds, Choice, Conditions, best_by_mode, guess_rate_of, pace

MARGIN, GAIN = 0.05, 0.1
"""What is followed gives way to what is better by the one; drafting has to give the other more than none."""
CAUTION = 0.9
"""What a mode that was never measured is taken to give, of what its formula says beside the target alone's."""
PROBE = Choice("sequential", 2)
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
    """

    choice: Choice = OFF
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

    def heard(self, choice: Choice, num_tokens: int, seconds: float, now_s: float) -> None:
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
