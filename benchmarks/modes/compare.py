"""Variants compared on the same work: rounds in which each runs once, so that a machine's drift hits all alike."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

from benchmarks.modes.load import Workload
from benchmarks.modes.measures import Run
from benchmarks.modes.prompts import prompts_of
from specdec.core.errors import InvalidParameterError

ALONE = "target alone"
ServiceMode = Literal["sequential", "overlap", "outcomes", "auto"]
"""Modes of a service: ``outcomes`` is overlap with branches, ``auto`` leaves everything to the controller."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One mode to do the same work.

    Attributes:
        name: As it stands in the table.
        num_speculative_tokens: What each request asks for; 0 is the target alone, None leaves it to the service.
        mode: Of the service that is asked; None takes any.
    """

    name: str
    num_speculative_tokens: int | None
    mode: ServiceMode | None = None


Runner = Callable[[Variant, Workload], Run]
"""Runs a workload once as a variant does."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every variant has to do.

    Attributes:
        prompts: Kind of prompts; see :mod:`benchmarks.modes.prompts`.
        num_streams: Streams at once.
    """

    prompts: str
    num_streams: int
    max_tokens: int
    temperature: float

    def workload(self, variant: Variant, number: int = 0) -> Workload:
        """As a run takes it; every round has seeds of its own, so that a lucky text counts once."""
        prompts = prompts_of(self.prompts, self.num_streams)
        first_seed = number * self.num_streams
        return Workload(prompts, self.max_tokens, self.temperature, variant.num_speculative_tokens, first_seed)


class Pooled(NamedTuple):
    """A ratio of throughputs over all rounds, and its 95% interval."""

    ratio: float
    low: float
    high: float


_RESAMPLES = 4000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of every variant on one piece of work, round by round; the others are held against the first variant."""

    work: Work
    variants: tuple[Variant, ...]
    runs: tuple[tuple[Run, ...], ...]

    def ratios(self, variant: int) -> tuple[float, float, float]:
        """Throughput of a variant over that of the first, within rounds: least, median, most."""
        pairs = zip(self.runs[variant], self.runs[0], strict=True)
        ratios = sorted(run.tokens_per_s / base.tokens_per_s for run, base in pairs)
        return ratios[0], statistics.median(ratios), ratios[-1]

    def best_fixed(self) -> int | None:
        """The variant with a draft length of its own, or none, that gave the most tokens per second over all rounds."""
        fixed = [i for i, variant in enumerate(self.variants) if variant.num_speculative_tokens is not None]
        return max(fixed, key=lambda i: _pooled_rate(self._totals(i)), default=None)

    def pooled(self, variant: int, base: int) -> Pooled:
        """Throughput of a variant over that of another, all rounds together, with a bootstrap interval over the rounds.

        Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3: the percentile interval.
        """
        pairs = list(zip(self._totals(variant), self._totals(base), strict=True))
        rng = random.Random(0)
        drawn = sorted(_pooled_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
        tail = round(_RESAMPLES * (1 - _CONFIDENCE) / 2)
        return Pooled(_pooled_ratio(pairs), drawn[tail], drawn[-1 - tail])

    def _totals(self, variant: int) -> list[_Total]:
        return [(run.num_tokens, run.duration_s) for run in self.runs[variant]]

    def has_equal_texts(self, variant: int) -> bool:
        """Whether in every round a variant gave the texts of the first."""
        return all(run.texts == base.texts for run, base in zip(self.runs[variant], self.runs[0], strict=True))


_Total = tuple[int, float]
"""Tokens and seconds of a run."""


def _pooled_rate(totals: Sequence[_Total]) -> float:
    return sum(num_tokens for num_tokens, _ in totals) / sum(duration_s for _, duration_s in totals)


def _pooled_ratio(pairs: Sequence[tuple[_Total, _Total]]) -> float:
    mine, others = zip(*pairs, strict=True)
    return _pooled_rate(mine) / _pooled_rate(others)


def parse_variants(names: Sequence[str], draft_lengths: Sequence[int]) -> tuple[Variant, ...]:
    """Every mode at every draft length; length 0 is the target alone, once, and first.

    The mode ``auto`` chooses its lengths itself and stands once.

    Args:
        names: Modes; none leaves the mode to the service.
        draft_lengths: Draft tokens per round.

    Raises:
        InvalidParameterError: A name is no mode.
    """
    known = get_args(ServiceMode)
    for given in names:
        if given not in known:
            raise InvalidParameterError("modes", f"modes: {given!r} is none of {', '.join(known)}")
    variants = [Variant(ALONE, 0)] if 0 in draft_lengths else []
    services: tuple[str | None, ...] = tuple(names) or (None,)
    for name in services:
        if name == "auto":
            variants.append(Variant("auto", None, "auto"))
            continue
        label = "" if name is None else f"{name.replace('_', ' ')}, "
        for length in draft_lengths:
            if length:
                variants.append(Variant(f"{label}{length} draft tokens", length, cast(ServiceMode | None, name)))
    return tuple(variants)


def compare(
    runner: Runner,
    variants: Sequence[Variant],
    work: Work,
    *,
    rounds: int,
    report: Callable[[str], None],
    warmup_rounds: int = 1,
) -> Comparison:
    """Run every variant once a round, after rounds that do not count.

    Args:
        runner: Runs one variant once.
        variants: At least one.
        work: The same for all.
        rounds: That count.
        report: Is given a line per round.
        warmup_rounds: That do not count, and come first.
    """
    runs: list[list[Run]] = [[] for _ in variants]
    what = f"{work.prompts}, {work.num_streams} stream(s), temperature {work.temperature:g}"
    for number in range(1 - warmup_rounds, rounds + 1):
        last = [runner(variant, work.workload(variant, number + warmup_rounds - 1)) for variant in variants]
        rates = ", ".join(f"{run.tokens_per_s:.1f}" for run in last)
        counts = f"round {number} of {rounds}" if number > 0 else "warm-up, not counted"
        report(f"{what}: {counts}: {rates} tokens/s")
        if number > 0:
            for run, done in zip(last, runs, strict=True):
                done.append(run)
    return Comparison(work, tuple(variants), tuple(tuple(done) for done in runs))
