"""When what an answer's tokens lack is more than rounding: two tests, with thresholds that follow from one assumption.

The assumption: the rounding of an honest service differs from the auditor's at most :data:`FACTOR` times as much as two
readings of the auditor's own differ, whose sums have other orders (long chunks, and short ones). It is measured in
every audit, on the answers themselves.

- A single token: the difference of two logits' rounding is taken as sub-Gaussian, and the bound is that which none of
  all audited tokens exceeds but with probability ``alpha``.
- Many tokens: the clipped excesses have at most a known mean under the assumption, so that a bettor's capital who bets
  on more is a supermartingale, and exceeds 1 / alpha at any time with probability alpha at most (Ville 1939;
  Waudby-Smith and Ramdas 2024, section 4). It needs no independence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.receipts.scoring import Floats, Scores

ALPHA = 1e-6
"""Probability, over a whole audit, that an honest service is flagged."""
FACTOR = 2.0
TIE = 1e-3
"""In logits. Less than this is a tie in any precision: float32's own rounding, with room."""
_MEAN_ALPHA = ALPHA / 8
"""Probability that a mean of the auditor's own readings is below the true one by more than is added to it.

The two means and the two tests that use them have an eighth each, the two bounds of single tokens a quarter."""
_STAKES = (0.5, 0.2, 0.05, 0.02, 0.005, 0.001)
"""Parts of its capital that a bettor could lose on a token without an excess; the capital is that of all of them."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one audit, in logits.

    Attributes:
        gap: Of what a single token lacks.
        mean_gap: Of the mean of ``min(gap, bound) / bound``.
        logprob: Of the difference of a single log probability.
        mean_logprob: Of the mean of ``min(difference, bound) / bound``.
        num_tokens: Tokens that were read twice.
    """

    gap: float
    mean_gap: float
    logprob: float
    mean_logprob: float
    num_tokens: int


class Rounding:
    """What two readings of the same answers differ by."""

    def __init__(self) -> None:
        self._gaps: list[Floats] = []
        self._margins: list[Floats] = []
        self._logprobs: list[Floats] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return sum(map(len, self._gaps))

    def add(self, first: Scores, second: Scores, temperature: float) -> None:
        """Take an answer, read twice: the second time for the best two of the first."""
        unit = temperature or 1.0
        with np.errstate(invalid="ignore"):  # where a second token was not allowed
            margins = np.abs(first.margins - second.margins) * unit
        self._gaps.append(second.gaps * unit)
        self._margins.append(margins[np.isfinite(margins)])
        self._logprobs.append(np.abs(first.logprobs - second.logprobs))

    def bounds(self, num_tokens: int, alpha: float = ALPHA) -> Bounds:
        """The bounds of an audit of so many tokens."""
        times = FACTOR * math.sqrt(2 * math.log(8 * max(num_tokens, 1) / alpha))
        gap = max(TIE, times * _rms(self._margins))
        logprob = max(TIE, times * _rms(self._logprobs))
        # The chance of a near-tie grows with the rounding, and so does what it lacks.
        mean_gap = FACTOR**2 * _upper_mean(self._gaps, gap)
        return Bounds(
            gap, min(mean_gap, 0.5), logprob, min(FACTOR * _upper_mean(self._logprobs, logprob), 0.5), self.num_tokens
        )


def first_excess(values: Floats, bound: float) -> int | None:
    """The first value above a bound; None where there is none."""
    above = np.flatnonzero(values > bound)
    return int(above[0]) if len(above) else None


def first_proved(values: Floats, bound: float, mean: float, alpha: float) -> int | None:
    """The first value after which so many excesses have at most the probability ``alpha``; None where there is none.

    Args:
        values: At least 0.
        bound: Where they are clipped.
        mean: Which ``min(value, bound) / bound`` has at most, given those before it.
        alpha: Over all of them.
    """
    excess = np.minimum(values, bound) / bound - mean
    stakes = np.array(_STAKES)[:, None] / mean
    capital: NDArray[np.float64] = np.log1p(stakes * excess).cumsum(1)
    return first_excess(np.logaddexp.reduce(capital, axis=0) - math.log(len(_STAKES)), -math.log(alpha))


def _rms(parts: list[Floats]) -> float:
    values = np.concatenate(parts) if parts else np.zeros(0)
    return float(np.sqrt(np.square(values).mean())) if len(values) else 0.0


def _upper_mean(parts: list[Floats], bound: float) -> float:
    """Above the mean of the clipped values but with a small probability: Maurer and Pontil 2009, theorem 4."""
    values = np.minimum(np.concatenate(parts), bound) / bound if parts else np.ones(1)
    if len(values) < 2:
        return 1.0
    log = math.log(2 / _MEAN_ALPHA)
    own = float(values.mean() + math.sqrt(2 * values.var(ddof=1) * log / len(values)))
    return own + 7 * log / (3 * (len(values) - 1))
