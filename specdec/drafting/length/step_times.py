"""The time of a step as a function of what is in it, fitted to what workers report."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
