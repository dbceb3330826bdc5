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

from specdec.control.limits import Arm, Conditions, expected_tokens

Floats = npt.NDArray[np.float64]

_MEMORY_STEPS = 800.0
_MOST_ENTRIES = 40
_SAME_RATE = 0.02
"""Acceptance rates that differ by less are taken for one, as in :class:`specdec.control.estimates.TrackedRate`."""


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
        return tokens_of(self.lengths, acceptance_rate)


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
        lengths: Rounds by number of draft tokens, where they are known.
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
    lengths: Mapping[int, float] = field(default_factory=dict)

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

    def revised(self, acceptance_rate: float) -> Entry:
        """As it looks today, if the acceptance rate of the time is so near today's that it was the same in truth.

        Today's is the better estimate of it then. Arms that were measured at different times would otherwise differ by
        what the estimate was off at each.
        """
        if not self.lengths or abs(acceptance_rate - self.acceptance_rate) > _SAME_RATE:
            return self
        return replace(self, acceptance_rate=acceptance_rate, expected=tokens_of(self.lengths, acceptance_rate))

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
            lengths={
                length: kept * self.lengths.get(length, 0.0) + newer.lengths.get(length, 0.0)
                for length in self.lengths.keys() | newer.lengths.keys()
            },
        )


class Place(NamedTuple):
    """Where an arm stands among others, in what the error of its formula depends on; octaves.

    Attributes:
        style: Index of its kind and wait.
        length: Draft tokens.
        branches: With the chain itself.
        drafting: Time of a draft step; 0 where none is made.
        load: Sequences on the target.
    """

    style: int
    length: float
    branches: float
    drafting: float
    load: float


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
        drafting_octaves: ... of the time of a draft step, by which they decide what fits.
        load_octaves: ... of the load.
        step: Error of one measured step.
        pause: What a step that takes far longer, as one does now and then, weighs as the only one measured.
        least: Error that does not go away however long is measured.
        drift: Error that a measurement gains in a minute.
    """

    off: float = 0.25
    common: float = 0.05
    style: float = 0.1
    waits: float = 0.9
    length_octaves: float = 2.0
    branch_octaves: float = 64.0
    drafting_octaves: float = 0.7
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

    def covariance(self, ones: Sequence[Place], others: Sequence[Place]) -> Floats:
        """Of the formulas' errors, as [ones, others]."""
        places, other_places = (np.array(some, dtype=np.float64) for some in (ones, others))
        kinds, other_kinds = places[:, 0], other_places[:, 0]
        octaves = np.array([self.length_octaves, self.branch_octaves, self.drafting_octaves, self.load_octaves])
        near = np.exp(-np.abs(places[:, None, 1:] - other_places[None, :, 1:]) / octaves)
        ahead = (kinds[:, None] >= _FIRST_AHEAD) & (other_kinds[None] >= _FIRST_AHEAD)
        wait = (kinds[:, None] >= _FIRST_WAITING) & (other_kinds[None] >= _FIRST_WAITING)
        common = np.where(ahead, self.common**2 * near[..., 3], 0.0)
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


def _place(arm: Arm, conditions: Conditions) -> Place:
    """Of an arm at the load that the conditions are for."""
    rows = 1 + arm.num_branches
    return Place(
        style=_STYLES[arm.style],
        length=math.log2(max(arm.num_draft_tokens, 1)),
        branches=math.log2(rows),
        drafting=0.0 if arm.kind == "off" else math.log2(conditions.draft_s(rows)),
        load=math.log2(max(conditions.num_rows, 1)),
    )


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
        self,
        ways: Sequence[Arm],
        conditions: Conditions,
        acceptance_rate: float,
        now_s: float,
        predicted: Callable[[Entry], float],
    ) -> dict[Arm, Belief]:
        """What is to be believed of the formulas of arms.

        Args:
            ways: The arms.
            conditions: The load, and how long draft steps take.
            acceptance_rate: Of today.
            now_s: Time.
            predicted: What the formula says today of an entry's arm, load and acceptance rate: tokens per second.
        """
        places = [_place(arm, conditions) for arm in ways]
        own = np.array([self.likeness.prior(arm) for arm in ways])
        entries = [entry.revised(acceptance_rate) for entry in self.entries.values()]
        if not entries:
            return {arm: Belief(0.0, math.sqrt(v)) for arm, v in zip(ways, own, strict=True)}
        tried = [_place(entry.arm, conditions.at_load(entry.num_rows, entry.num_draft_rows)) for entry in entries]
        ratios = np.array([entry.log_pace - math.log(predicted(entry)) for entry in entries]).clip(-1.5, 1.5)
        noise = np.diag([self.likeness.variance(entry, now_s) for entry in entries])
        across = self.likeness.covariance(places, tried)
        gains = np.linalg.solve(self.likeness.covariance(tried, tried) + noise, across.T).T
        errors = np.sqrt(np.maximum(own - (gains * across).sum(1), 0.0))
        return {arm: Belief(float(m), float(e)) for arm, m, e in zip(ways, gains @ ratios, errors, strict=True)}


def tokens_of(lengths: Mapping[int, float], acceptance_rate: float) -> float:
    """Tokens that rounds with so many draft tokens give on average."""
    return sum(count * expected_tokens(acceptance_rate, length) for length, count in lengths.items())


def load_octave(num_rows: int) -> int:
    """Of the load."""
    return round(math.log2(max(num_rows, 1)))
