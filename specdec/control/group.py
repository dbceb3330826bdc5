"""The sequences that share a target: which way of speculating they follow, and what was learned of each way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.control.estimates import DecayedRate
from specdec.control.ways import OFF, Bounds, Choice, Conditions, best_by_way, guess_rate_of, pace
from specdec.types import Way

GAIN = 0.03
"""Drafting has to give so much more than the target alone: less is not worth a drafter's time."""
HYSTERESIS = 0.03
"""Another choice has to be better than the present one by so much."""
CAUTION = 0.9
"""What a way that was never measured is taken to give, of what its formula says beside the target alone's."""
PROBE = Choice("in_turn", 2)
PROBE_ROUNDS = 8
PROBE_SHARE = 0.01
"""Most of the target's rows that carry a probe's drafts, in the long run."""
LONGEST_REST = 4
"""Probes that find nothing come less often each time, down to a part of what their share allows."""
KNOWN_TRIALS = 8
"""A kind of request is known once so many of its draft tokens were judged."""
PRIOR_RATE, PRIOR_TRIALS = 0.5, 4.0
"""Before anything was judged a draft token, or a guess, is as often right as wrong."""
PRIOR_TOKENS, AGE_S = 16.0, 120.0
"""A factor trusts its prior like so many tokens, and itself 1/e after so long without news."""


@dataclass
class Group:
    """What is known of the sequences of one target, whether or not any is there.

    Choices and corrections are kept by load, in octaves of the number of rows.

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
    _factors: dict[tuple[Way, int], tuple[DecayedRate, float]] = field(default_factory=dict)
    _plain_s: dict[int, float] = field(default_factory=dict)
    _reported: Choice = OFF
    _probe_rounds: int = 0
    _rest_rounds: float = 0.0
    _patience: float = 1.0

    def choice_at(self, num_rows: int) -> Choice:
        """What was chosen last with about so many rows, before a review has seen them."""
        return self._choices.get(num_rows.bit_length(), self.choice)

    @property
    def guess_rate(self) -> float:
        """How often the draft's next guess is right; a half until it is measured."""
        return self.guesses.rate(PRIOR_RATE, PRIOR_TRIALS)

    def heard(self, choice: Choice, num_rounds: int, num_tokens: int, seconds: float, now_s: float) -> None:
        """A sequence that follows a choice, for a while already, had these rounds."""
        if self.choice == OFF:
            self._rest_rounds -= num_rounds
        conditions = self.conditions
        if conditions is None or choice != self.choice:
            return
        expected = pace(choice, conditions, self.acceptance_rate)
        # Reading another's prompt, or being preempted, is not the way's doing.
        seconds = min(seconds, 4 * num_rounds * expected.round_s)
        octave = conditions.num_rows.bit_length()
        rate = 1 / self._step_s(conditions) if choice == OFF else expected.tokens_per_s
        factor, _ = self._factors.get((choice.way, octave), (DecayedRate(), now_s))
        self._factors[choice.way, octave] = factor.add(num_tokens, seconds * rate), now_s

    def probed(self, num_rounds: int) -> None:
        """The sequence that probes had so many rounds. A probe goes on until the next review: it costs what it took."""
        self._probe_rounds += num_rounds
        self._rest_rounds += num_rounds / PROBE_SHARE * self._patience

    def guesses_reported(self, hits: float, misses: float) -> None:
        """Branch hits and misses since the last report; nothing if the choice has changed since."""
        choice, self._reported = self._reported, self.choice
        if choice.way != "outcomes" or choice != self.choice or not hits + misses:
            return
        rate = hits / (hits + misses)
        guess_rate = guess_rate_of(rate, self.acceptance_rate, choice.num_draft_tokens, choice.num_branches)
        self.guesses = self.guesses.add(guess_rate * (hits + misses), hits + misses)

    def review(self, conditions: Conditions | None, acceptance_rate: float, bounds: Bounds, now_s: float) -> None:
        """Choose anew: the best choice of each way by its formula, and among those the best by what was measured."""
        self.conditions, self.acceptance_rate = conditions, acceptance_rate
        if conditions is None or not bounds.num_draft_tokens:  # where nobody may draft nothing is learned from that
            self.choice = OFF
            return
        octave = conditions.num_rows.bit_length()
        present = self._choices.get(octave, OFF)
        found = best_by_way(conditions, acceptance_rate, bounds)
        scores = {
            choice: expected.tokens_per_s * self.factor(way, conditions, now_s)
            for way, (choice, expected) in found.items()
        }
        scores[OFF] = self.alone(conditions)
        winner = max(scores, key=scores.__getitem__)
        if present.way in found and present not in scores and present in set(bounds.choices()):
            rate = pace(present, conditions, acceptance_rate).tokens_per_s
            scores[present] = rate * self.factor(present.way, conditions, now_s)
        if scores[winner] <= scores.get(present, 0.0) * (1 + HYSTERESIS):
            winner = present
        if scores[winner] <= scores[OFF] * (1 + GAIN):
            winner = OFF
        self.choice = self._choices[octave] = winner
        if winner != OFF:
            self._patience, self._rest_rounds = 1.0, 0.0

    def alone(self, conditions: Conditions) -> float:
        """Tokens per second of a sequence without drafts, as measured last: it does not age, but is soon measured."""
        factor, _ = self._factors.get(("off", conditions.num_rows.bit_length()), (DecayedRate(), 0.0))
        return factor.rate(1.0, PRIOR_TOKENS) / self._step_s(conditions)

    def _step_s(self, conditions: Conditions) -> float:
        """A step without drafts: the shortest that was known, as it may be longer beside a drafter."""
        octave = conditions.num_rows.bit_length()
        self._plain_s[octave] = min(conditions.target_s(0), self._plain_s.get(octave, math.inf))
        return self._plain_s[octave]

    def factor(self, way: Way, conditions: Conditions, now_s: float) -> float:
        """Measured over predicted pace of a way that drafts: at this load, or else at those that are nearest to it."""
        octave = conditions.num_rows.bit_length()
        factor = CAUTION * min(1.0, self.alone(conditions) * conditions.target_s(0))
        measured = [(-abs(at - octave), *one) for (other, at), one in self._factors.items() if other == way]
        for _, rate, at_s in sorted(measured, key=lambda entry: entry[0]):
            factor = rate.times(math.exp((at_s - now_s) / AGE_S)).rate(factor, PRIOR_TOKENS / factor)
        return factor

    def probe(self, unknown: Sequence[str], able: Sequence[str]) -> str | None:
        """While off, the one sequence that drafts a little, now and then: first one of an unknown kind.

        Args:
            unknown: Sequences of a kind of which no draft token was judged.
            able: All that may draft.
        """
        if self._probe_rounds >= PROBE_ROUNDS:
            self._patience = min(2 * self._patience, LONGEST_REST)
        if self.choice != OFF or self.probing not in able or self._probe_rounds >= PROBE_ROUNDS:
            self.probing, self._probe_rounds = None, 0
        if self.choice == OFF and able and self.probing is None and (unknown or self._rest_rounds <= 0):
            self.probing = (unknown or able)[0]
        return self.probing

    def figures(self) -> dict[str, float]:
        """Choice and estimates, by name."""
        figures = {"planned_draft_tokens": float(self.choice.num_draft_tokens), "estimated_guess_rate": self.guess_rate}
        if self.conditions is not None:
            figures["estimated_target_step_seconds"] = self.conditions.target_s(0)
            figures["estimated_verify_step_seconds"] = self.conditions.target_s(self.choice.num_draft_tokens)
            figures["estimated_draft_step_seconds"] = self.conditions.draft_s(self.choice.num_branches)
            figures["estimated_round_trip_seconds"] = self.conditions.round_trip_s
        return figures
