"""What was measured of whole arms, and what that says of those that were not.

The formulas of :mod:`specdec.control.limits` leave things out: workers that share a processor, offers that come late,
drafts whose tokens depend on one another. So an arm that was tried is judged by its measured pace, and others by
their formula, corrected by how far formulas of similar arms were off: Gaussian process regression of the logarithm of
measured over predicted pace (Rasmussen and Williams 2006, equations 2.25 and 2.26), which says how sure it is, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.control.limits import Arm, expected_tokens

Floats = npt.NDArray[np.float64]

_MEMORY_STEPS = 800.0
_MOST_ENTRIES = 40


@dataclass
class Observed:
    """What was measured of the present arm since the last review.

    Attributes:
        lengths: Rounds by number of draft tokens.
        num_tokens: That came.
        seconds: Of all rounds together.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0
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

    def expected_tokens(self, acceptance_rate: float) -> float:
        """Tokens that drafts of such lengths give on average."""
        return sum(count * expected_tokens(acceptance_rate, length) for length, count in self.lengths.items())


class Belief(NamedTuple):
    """How far the pace of an arm is from its formula: logarithm of the ratio, and standard deviation of that."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured of an arm at about one load; sums over the newest rounds, older ones counting less.

    Attributes:
        arm: The way of speculating.
        num_rows: Sequences on the target.
        num_draft_rows: Sequences on the drafter.
        acceptance_rate: Of the time.
        num_rounds: Rounds of all sequences.
        seconds: Of all rounds together.
        expected: Tokens that drafts of such lengths give on average.
        tokens: Tokens that came.
        at_s: When it was last measured.
    """

    arm: Arm
    num_rows: int
    num_draft_rows: int
    acceptance_rate: float
    num_rounds: float
    seconds: float
    expected: float
    tokens: float
    at_s: float

    @property
    def num_steps(self) -> float:
        """Target steps behind it."""
        return self.num_rounds / self.num_rows

    @property
    def log_pace(self) -> float:
        """Logarithm of the tokens per second of a sequence.

        At first with the tokens to be expected: chance moves those that come by tens of percent, and the acceptance
        rate is known better than that. In the long run they count, as draft tokens are not accepted independently.
        """
        trust = self.num_rounds / (self.num_rounds + 400)
        return math.log(self.expected / self.seconds) + trust * math.log(max(self.tokens, 1.0) / self.expected)

    def add(self, newer: Entry) -> Entry:
        """With a newer measurement of the same arm at the same load."""
        kept = max(0.0, 1 - newer.num_steps / _MEMORY_STEPS)
        old = kept * self.num_rounds
        share = newer.num_rounds / (old + newer.num_rounds)
        rate = self.acceptance_rate + share * (newer.acceptance_rate - self.acceptance_rate)
        return replace(
            newer,
            acceptance_rate=rate,
            num_rounds=old + newer.num_rounds,
            seconds=kept * self.seconds + newer.seconds,
            expected=kept * self.expected + newer.expected,
            tokens=kept * self.tokens + newer.tokens,
        )


@dataclass(frozen=True)
class Likeness:
    """How formulas' errors vary and go together; standard deviations of logarithms.

    Attributes:
        off: Error of the formula of target alone: its steps are measured, but while drafts run beside them.
        common: Error that all ways of drafting ahead share: late offers, processors that both workers use.
        style: Error that arms of the same kind and wait share, the less the further apart they are.
        waits: Share of that which arms that wait for branches and for chains have in common.
        length_octaves: Distance, in octaves of draft length, at which the likeness falls to 1/e.
        branch_octaves: ... of branches: how many there are says little of what fits before a deadline.
        load_octaves: ... of the load.
        step: Error of one measured step.
        pause: What a step that takes far longer, as one does now and then, weighs as the only one measured.
        least: Error that does not go away however long is measured.
        drift: Error that a measurement gains in a minute.
    """

    off: float = 0.25
    common: float = 0.05
    style: float = 0.1
    waits: float = 0.8
    length_octaves: float = 2.0
    branch_octaves: float = 8.0
    load_octaves: float = 6.0
    step: float = 0.15
    pause: float = 0.8
    least: float = 0.006
    drift: float = 0.03

    def prior(self, arm: Arm) -> float:
        """Variance of the error of an arm's formula."""
        if arm.kind == "off":
            return self.off**2
        return self.style**2 + (self.common**2 if _STYLES[arm.style] >= _FIRST_AHEAD else 0.0)

    def covariance(self, ones: Sequence[tuple[Arm, float]], others: Sequence[tuple[Arm, float]]) -> Floats:
        """Of the formulas' errors; arms with the logarithm of the load, as [ones, others]."""
        (kinds, places), (other_kinds, other_places) = _features(ones), _features(others)
        octaves = np.array([self.length_octaves, self.branch_octaves, self.load_octaves])
        near = np.exp(-np.abs(places[:, None] - other_places[None]) / octaves)
        ahead = (kinds[:, None] >= _FIRST_AHEAD) & (other_kinds[None] >= _FIRST_AHEAD)
        wait = (kinds[:, None] >= _FIRST_WAITING) & (other_kinds[None] >= _FIRST_WAITING)
        common = np.where(ahead, self.common**2 * near[..., 2], 0.0)
        alike = np.where(kinds[:, None] == other_kinds[None], 1.0, np.where(wait, self.waits, 0.0))
        errors: Floats = np.where(kinds[:, None] > 0, self.style**2, self.off**2) * near.prod(-1)
        return common + alike * errors

    def variance(self, entry: Entry, now_s: float) -> float:
        """Of a measurement."""
        age = max(0.0, now_s - entry.at_s) / 60
        num_steps = max(entry.num_steps, 0.5)
        return self.step**2 / num_steps + (self.pause / num_steps) ** 2 + self.least**2 + self.drift**2 * age


_STYLES = {
    ("off", "no"): 0,
    ("in_turn", "no"): 1,
    ("overlap", "no"): 2,
    ("outcomes", "no"): 3,
    ("outcomes", "branch"): 4,
    ("outcomes", "chain"): 5,
}
_FIRST_AHEAD, _FIRST_WAITING = 2, 4


def _features(ones: Sequence[tuple[Arm, float]]) -> tuple[npt.NDArray[np.int64], Floats]:
    styles = np.array([_STYLES[arm.style] for arm, _ in ones])
    places = [(math.log2(max(arm.num_draft_tokens, 1)), math.log2(1 + arm.num_branches), load) for arm, load in ones]
    return styles, np.array(places, dtype=np.float64)


@dataclass(frozen=True)
class Experience:
    """Measurements of arms, by arm and octave of the load.

    Attributes:
        entries: The oldest first.
        likeness: Of arms.
    """

    entries: Mapping[tuple[Arm, int], Entry] = field(default_factory=dict)
    likeness: Likeness = Likeness()

    def add(self, entry: Entry) -> Experience:
        """With a newer measurement; of many the one that was not renewed for longest is forgotten."""
        key = entry.arm, load_octave(entry.num_rows)
        entries = dict(self.entries)
        held = entries.pop(key, None)
        entries[key] = entry if held is None else held.add(entry)
        if len(entries) > _MOST_ENTRIES:
            del entries[next(iter(entries))]
        return replace(self, entries=entries)

    def beliefs(
        self, ways: Sequence[Arm], num_rows: int, now_s: float, predicted: Callable[[Entry], float]
    ) -> dict[Arm, Belief]:
        """What is to be believed of the formulas of arms.

        Args:
            ways: The arms.
            num_rows: The load.
            now_s: Time.
            predicted: What the formula says today of an entry's arm, load and acceptance rate: tokens per second.
        """
        places = [(arm, math.log2(max(num_rows, 1))) for arm in ways]
        own = np.array([self.likeness.prior(arm) for arm in ways])
        entries = list(self.entries.values())
        if not entries:
            return {arm: Belief(0.0, math.sqrt(v)) for arm, v in zip(ways, own, strict=True)}
        tried = [(entry.arm, math.log2(entry.num_rows)) for entry in entries]
        ratios = np.array([entry.log_pace - math.log(predicted(entry)) for entry in entries]).clip(-1.5, 1.5)
        noise = np.diag([self.likeness.variance(entry, now_s) for entry in entries])
        across = self.likeness.covariance(places, tried)
        gains = np.linalg.solve(self.likeness.covariance(tried, tried) + noise, across.T).T
        errors = np.sqrt(np.maximum(own - (gains * across).sum(1), 0.0))
        return {arm: Belief(float(m), float(e)) for arm, m, e in zip(ways, gains @ ratios, errors, strict=True)}


def load_octave(num_rows: int) -> int:
    """Of the load."""
    return round(math.log2(max(num_rows, 1)))
