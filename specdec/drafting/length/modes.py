"""What each speculation mode gives: tokens and time of a round, as closed formulas over measured step times.

A round is one verification of one sequence. Notation: ``t_T`` a target step, ``t_d`` a draft
step, ``K`` the draft length, ``a`` the acceptance rate per draft token, ``E = (1 - a^(K+1)) / (1 - a)``, ``2 delta``
the time from a verdict leaving the target to an offer made of it reaching the target, drafting left out.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) for ``E`` and drafting in turn, SSD (arXiv 2603.03251) for outcomes.
"""

from __future__ import annotations

import bisect
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, floor
from typing import NamedTuple, get_args

from specdec.core.types import SpeculationMode

_SIZES_PER_OCTAVE = 12
"""Steps whose tokens differ by less are one size, whatever their rows."""


class StepTime(NamedTuple):
    """What a worker measured of steps of about the same size: means, the median duration, how many there were."""

    rows: float
    tokens: float
    seconds: float
    num_steps: float


@dataclass(frozen=True)
class StepTimes:
    """A monotone curve through measured step times.

    Steps of about as many rows count most: a point's weight falls by four for each octave between its rows and those
    asked for. Through the weighted points goes the closest curve that never falls with tokens (isotonic regression by
    pooling adjacent violators, Barlow et al. 1972), joined by straight lines. Beyond the largest step seen the curve
    goes on as it did over the last octave; where only one size was seen all are taken to be as cheap, and measured as
    soon as they are tried.
    """

    points: tuple[StepTime, ...] = ()
    _curves: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict, compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.points)

    def at(self, rows: float, tokens: float) -> float:
        """Seconds of a step of so many rows and tokens, where any was measured."""
        octave = round(2 * math.log2(max(rows, 1)))
        if octave not in self._curves:
            self._curves[octave] = monotone_curve(self.points, octave / 2)
        return interpolate(*self._curves[octave], tokens)


def step_times(metrics: Mapping[str, float]) -> StepTimes:
    """What a worker's metrics say of its steps; see :class:`specdec.engine.timing.StepTimer`. Nonsense is left out."""
    points = []
    i = 0
    while f"step/{i}/seconds" in metrics:
        figures = [metrics.get(f"step/{i}/{name}", 0.0) for name in StepTime._fields]
        if all(math.isfinite(figure) and figure > 0 for figure in figures):
            points.append(StepTime(*figures))
        i += 1
    return StepTimes(tuple(points))


def monotone_curve(points: Iterable[StepTime], octave: float) -> tuple[list[float], list[float]]:
    """Tokens and seconds, both ascending, of the curve for rows of 2**octave."""
    sizes = _merged(points, octave)
    blocks: list[tuple[float, float, int]] = []  # weight, weight x seconds, sizes
    for weight, _, seconds in sizes:
        blocks.append((weight, weight * seconds, 1))
        while len(blocks) > 1 and blocks[-2][1] / blocks[-2][0] >= blocks[-1][1] / blocks[-1][0]:
            last, before = blocks.pop(), blocks.pop()
            blocks.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    levels = [seconds / weight for weight, seconds, count in blocks for _ in range(count)]
    return [tokens for _, tokens, _ in sizes], levels


def _merged(points: Iterable[StepTime], octave: float) -> list[tuple[float, float, float]]:
    """Weight, tokens and seconds, ascending; steps of nearly the same tokens and other rows are one size."""
    sums: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for point in points:
        weight = min(point.num_steps, 8.0) * 4.0 ** -abs(math.log2(max(point.rows, 1)) - octave)
        one = sums[round(_SIZES_PER_OCTAVE * math.log2(point.tokens))]
        one[:] = one[0] + weight, one[1] + weight * point.tokens, one[2] + weight * point.seconds
    return [(weight, tokens / weight, seconds / weight) for _, (weight, tokens, seconds) in sorted(sums.items())]


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The line through the points (xs ascending) at ``x``: level before them, after them on as over the last octave."""
    i = bisect.bisect_right(xs, x)
    if i == 0:
        return ys[0]
    if i == len(xs):
        half = xs[-1] / 2
        slope = (ys[-1] - interpolate(xs, ys, half)) / half if len(xs) > 1 else 0.0
        return ys[-1] + slope * (x - xs[-1])
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


MODES: tuple[SpeculationMode, ...] = get_args(SpeculationMode)
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
BRANCHES = (2, 4, 8, 16, 32)
TIE = 1.02
"""What promises less than that much more is as good: of such choices the one that drafts least is taken."""


class Choice(NamedTuple):
    """A speculation mode with its draft length and its fan-out."""

    mode: SpeculationMode = "off"
    num_draft_tokens: int = 0
    num_branches: int = 0


OFF = Choice()


@dataclass(frozen=True)
class Bounds:
    """What may be chosen: most draft tokens, most branches (0 is none), modes beside ``off``."""

    num_draft_tokens: int = DRAFT_LENGTHS[-1]
    num_branches: int = 16
    modes: frozenset[SpeculationMode] = frozenset(MODES)

    def choices(self) -> Iterator[Choice]:
        """All choices within these bounds, ``off`` first."""
        yield OFF
        for length in sorted({min(n, self.num_draft_tokens) for n in DRAFT_LENGTHS} - {0}):
            for mode in ("sequential", "overlap"):
                if mode in self.modes:
                    yield Choice(mode, length)
            if "outcomes" in self.modes and self.num_branches:
                for branches in sorted({min(n, self.num_branches) for n in BRANCHES}):
                    yield Choice("outcomes", length, branches)


@dataclass(frozen=True)
class Conditions:
    """What the pace of a sequence depends on.

    Attributes:
        alone: Its target's as profiled; alone it takes the shorter of these and the newest: a drafter may be busy.
        target: Step times of its target.
        draft: Step times of its drafter.
        num_rows: Sequences that share its target's steps.
        num_draft_rows: Sequences that share its drafter's steps.
        round_trip_s: ``2 delta``.
        guess_rate: How often the draft's next guess is right where its token and the guesses before were wrong.
        num_step_tokens: Tokens in a row that a step of its drafter gives each sequence or branch.
    """

    alone: StepTimes
    target: StepTimes
    draft: StepTimes
    num_rows: int
    num_draft_rows: int
    round_trip_s: float
    guess_rate: float
    num_step_tokens: int = 1

    def target_s(self, num_draft_tokens: float) -> float:
        """A step that verifies so many draft tokens per row."""
        return self.target.at(self.num_rows, self.num_rows * (1 + num_draft_tokens))

    def draft_s(self, num_branches: int) -> float:
        """A draft step with so many branches per sequence."""
        rows = self.num_draft_rows * (1 + num_branches)
        return self.draft.at(rows, rows * self.num_step_tokens)

    def num_fitting(self, seconds: float, draft_s: float) -> float:
        """Draft tokens that are there in time; a part of a step that gives several gives none of them."""
        num_steps = max(0.0, seconds / draft_s)
        return num_steps if self.num_step_tokens == 1 else self.num_step_tokens * floor(num_steps)


def pace(choice: Choice, conditions: Conditions, acceptance_rate: float) -> float:
    """Tokens per second of one sequence where all do alike; in turn E / (t_T + 2 delta + K t_d)."""
    length = choice.num_draft_tokens
    if choice.mode == "off":
        return 1 / min(conditions.alone.at(conditions.num_rows, conditions.num_rows), conditions.target_s(0))
    if choice.mode == "sequential":
        num_steps = ceil(length / conditions.num_step_tokens)
        round_s = conditions.target_s(length) + num_steps * conditions.draft_s(0)
        return expected_tokens(acceptance_rate, length) / (round_s + conditions.round_trip_s)
    return ahead(choice, conditions, acceptance_rate)


def ahead(choice: Choice, conditions: Conditions, acceptance_rate: float) -> float:
    """Draft while the target verifies, along the accepted path or for the likely outcomes; tokens per second.

    A chain of two states: a row has a draft of E tokens, or none and goes on plainly with one. It has a draft again if
    the outcome of its round was prepared (:func:`hit_rate`), as many tokens as fit into a step. What follows a plain
    round is a token shorter, as the token that the round decides has to be drafted first; where that leaves less than
    one, a draft follows only so often.
    """
    length, branches = choice.num_draft_tokens, choice.num_branches
    a, guess_rate, draft_s = acceptance_rate, conditions.guess_rate, conditions.draft_s(branches)
    plain_s = conditions.target_s(0)
    fit_plain = conditions.num_fitting(plain_s - conditions.round_trip_s, draft_s)
    step_s = conditions.target_s(min(length, fit_plain))
    fit = min(length, conditions.num_fitting(step_s - conditions.round_trip_s, draft_s))
    found = hit_rate(a, fit, branches, guess_rate) * min(1.0, fit)
    found_after_plain = hit_rate(a, 0, branches, guess_rate) * max(0.0, min(1.0, fit_plain - 1))
    share = found_after_plain / (1 - found + found_after_plain) if found_after_plain else 0.0
    tokens = 1 + share * (expected_tokens(a, fit) - 1)
    return tokens / (share * conditions.target_s(fit) + (1 - share) * plain_s)


def expected_tokens(acceptance_rate: float, num_draft_tokens: float) -> float:
    """E = 1 + a + ... + a^K: tokens of a verification of K draft tokens, the target's own token included."""
    if acceptance_rate > 1 - 1e-9:
        return 1.0 + num_draft_tokens
    return float((1 - acceptance_rate ** (num_draft_tokens + 1)) / (1 - acceptance_rate))


def hit_rate(acceptance_rate: float, num_draft_tokens: float, num_branches: int, guess_rate: float) -> float:
    """How often the outcome of verifying K draft tokens was prepared with so many branches.

    What follows all K and the draft's own next token costs no branch; every other outcome (number accepted, next token)
    costs one, and the likeliest are prepared first.
    """
    own = acceptance_rate ** (num_draft_tokens + 1)
    rates = round(acceptance_rate, 2), round(guess_rate, 2)
    return float(min(1.0, own + _guessed(*rates, round(num_draft_tokens), num_branches)))


@lru_cache(maxsize=1 << 14)
def _guessed(a: float, g: float, num_draft_tokens: int, num_branches: int) -> float:
    """How often the outcome is among the likeliest others: the j-th guess at a place is right with g (1 - g)^j."""
    likelihoods = (a**n * (1 - a) * g * (1 - g) ** j for n in range(num_draft_tokens + 1) for j in range(num_branches))
    return sum(sorted(likelihoods, reverse=True)[:num_branches])


def guess_rate_of(measured_hit_rate: float, acceptance_rate: float, num_draft_tokens: int, num_branches: int) -> float:
    """The guess rate at which so many hits are to be expected: the inverse of :func:`hit_rate`, in hundredths."""
    rates = [hit_rate(acceptance_rate, num_draft_tokens, num_branches, n / 100) for n in range(1, 100)]
    return (1 + bisect_left(rates, measured_hit_rate, hi=98)) / 100


def best_by_mode(conditions: Conditions, acceptance_rate: float, bounds: Bounds) -> list[Choice]:
    """Of each mode the choice with the most tokens per second; of equal ones the one that drafts least."""
    best: dict[SpeculationMode, tuple[float, Choice]] = {}
    for choice in bounds.choices():
        rate = pace(choice, conditions, acceptance_rate)
        if rate > TIE * best.get(choice.mode, (0.0, OFF))[0]:
            best[choice.mode] = rate, choice
    return [choice for _, choice in best.values()]
