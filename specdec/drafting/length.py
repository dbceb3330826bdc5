"""How many tokens to draft: the length that gives the most tokens a second, by acceptance and step times as measured.

The router asks for draft models on devices of their own, a target for its heads and for prompt look-up, and a pair in
one process for its draft model.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

from specdec.core.drafts import OF_HEADS, OFFERED, Draft, kept_share, nodes_of
from specdec.core.messages import TokenKind, TokenSource, token_kind, token_source
from specdec.core.params import SequenceSpec
from specdec.core.types import Tokens
from specdec.drafting.ngram import LONG_MATCH

GAIN = 0.05
"""Drafting must promise this much more than plain decoding."""
MARGIN = 0.03
"""Another choice must promise this much more than the present one: estimates are noisy, and a change costs rounds."""
TIE = 0.01
"""Choices closer than this to the best are as good; the one that drafts least is taken."""

T = TypeVar("T")


def best_choice(paces: Mapping[T, float], off: T, present: T) -> T:
    """Return the choice to follow from now on: the fastest, unless the present one or plain decoding is nearly as fast.

    Args:
        paces: Tokens per second by choice, those that draft least first; ``off`` is one of them.
        off: Plain decoding.
        present: The choice that is followed now; it may be missing from ``paces``.
    """
    fastest = max(paces.values())
    winner = next(choice for choice, pace in paces.items() if pace >= fastest * (1 - TIE))
    if paces.get(present, 0.0) * (1 + MARGIN) >= fastest:
        winner = present
    return winner if paces[winner] > paces[off] * (1 + GAIN) else off


def best_length(kept: Sequence[float], round_s: Sequence[float], present: int = 0) -> int:
    """Return the number of draft tokens to verify in each round.

    Args:
        kept: Probability that each draft token is kept, in the order in which tokens are verified.
        round_s: Seconds of a round that verifies no draft token, one, two, ...; one entry more than ``kept``.
        present: The length that is in use.
    """
    tokens = accumulate(kept, initial=1.0)
    paces = {length: gained / seconds for length, (gained, seconds) in enumerate(zip(tokens, round_s, strict=True))}
    return best_choice(paces, 0, present)


# Acceptance.

MEMORY = 256.0
"""Trials after which a trial counts 1/e."""
PRIOR_RATE, PRIOR_TRIALS = 0.5, 4.0
"""Before anything was judged a draft token is as often right as wrong."""


@dataclass(frozen=True, slots=True)
class DecayedRate:
    """Successes among trials; a trial that is ``MEMORY`` trials old counts 1/e."""

    successes: float = 0.0
    trials: float = 0.0

    def add(self, successes: float, trials: float) -> DecayedRate:
        """Return the rate with newer counts."""
        kept = self.times(max(0.0, 1 - trials / MEMORY))
        return DecayedRate(kept.successes + successes, kept.trials + trials)

    def times(self, share: float) -> DecayedRate:
        """Return the same rate with less weight."""
        return DecayedRate(self.successes * share, self.trials * share)

    def rate(self, prior: float, weight: float) -> float:
        """Return the rate, with a prior that counts like ``weight`` trials."""
        return (self.successes + prior * weight) / (self.trials + weight)


class Acceptance:
    """How often draft tokens are kept, by source, temperature, place and rank."""

    def __init__(self) -> None:
        self._rates: defaultdict[Hashable, DecayedRate] = defaultdict(DecayedRate)

    def learn(self, kind: Hashable, num_kept: float, num_judged: float) -> None:
        """Count newer tokens of a kind."""
        self._rates[kind] = self._rates[kind].add(num_kept, num_judged)

    def rate(self, kind: Hashable, prior: float = PRIOR_RATE) -> float:
        """Return the share of a kind that is kept; near ``prior`` until some tokens were judged."""
        return self._rates[kind].rate(prior, PRIOR_TRIALS)


def kind_of(spec: SequenceSpec) -> float:
    """Return a request's temperature, rounded to halves: acceptance depends on it."""
    return round(2 * spec.sampling.temperature) / 2


def tally(provenance: bytes, num_drafted: Sequence[int]) -> tuple[int, int, int]:
    """Count the notes of some tokens (:class:`specdec.core.messages.Notes`); the last token ends a round.

    Returns:
        Rounds; accepted tokens of a draft model; and tokens of it that were judged, which those after a refused one
        were not. Rounds whose draft was looked up say nothing of a draft model.
        Accepted over judged estimates the acceptance rate per token whatever the draft length (it is the
        maximum-likelihood estimate for a geometric run cut at K); accepted over drafted would fall as K grows.
    """
    num_rounds = num_accepted = num_judged = 0
    for byte, drafted in zip(provenance, num_drafted, strict=True):
        kind = token_kind(byte)
        num_rounds += bool(drafted) or kind is not TokenKind.ACCEPTED
        if token_source(byte) is TokenSource.MODEL:
            num_accepted += kind is TokenKind.ACCEPTED
            num_judged += kind in (TokenKind.ACCEPTED, TokenKind.CORRECTED)
    return num_rounds, num_accepted, num_judged


# Step times.


class StepTime(NamedTuple):
    """Steps of about the same size, as a worker measured them: means, and the median of their seconds."""

    rows: float
    tokens: float
    seconds: float
    num_steps: float


@dataclass(frozen=True)
class StepTimes:
    """A table of measured step times.

    Sizes that were not measured lie on the line between their neighbors. Beyond the largest size the line of its last
    octave goes on. Of equal sizes the one with the closest number of rows counts.
    """

    points: tuple[StepTime, ...] = ()
    _tables: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict, compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.points)

    def at(self, rows: float, tokens: float) -> float:
        """Return the seconds of a step of ``rows`` sequences and ``tokens`` tokens; at least one point is there."""
        octave = round(math.log2(max(rows, 1)))
        if octave not in self._tables:
            farthest_first = sorted(self.points, key=lambda point: -abs(math.log2(max(point.rows, 1)) - octave))
            table = {point.tokens: point.seconds for point in farthest_first}
            sizes = sorted(table)
            self._tables[octave] = sizes, [table[size] for size in sizes]
        return interpolate(*self._tables[octave], tokens)


def step_times(metrics: Mapping[str, float]) -> StepTimes:
    """Read a worker's metrics (:class:`specdec.engine.timing.StepTimer`); entries that make no sense are left out."""
    points = []
    i = 0
    while f"step/{i}/seconds" in metrics:
        figures = [metrics.get(f"step/{i}/{name}", 0.0) for name in StepTime._fields]
        if all(math.isfinite(figure) and figure > 0 for figure in figures):
            points.append(StepTime(*figures))
        i += 1
    return StepTimes(tuple(points))


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at ``x`` on the lines through points with ascending xs: level before them, the last octave's after."""
    i = bisect.bisect_right(xs, x)
    if i == 0:
        return ys[0]
    if i == len(xs):
        half = xs[-1] / 2
        slope = (ys[-1] - interpolate(xs, ys, half)) / half if len(xs) > 1 else 0.0
        return ys[-1] + max(0.0, slope) * (x - xs[-1])
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


# What a target asks.

REVIEW_STEPS = 32
"""A target's lengths are chosen again after so many of its steps."""
PROBE_EVERY = 64
"""One in so many rounds verifies a draft whole that is not worth it, to learn."""
PROBE_LENGTH = 2
"""Draft tokens of such a round if a draft model in the target's process makes them."""
MAX_OWN_TOKENS = 16
"""Longest draft of a draft model in the target's process if the request names no number."""

MODEL = "model"
"""Source of the drafts of draft models."""

_CHAIN = tuple(range(-1, 31))
_nodes_of = lru_cache(maxsize=256)(nodes_of)


class DraftLengths:
    """A :class:`specdec.core.drafts.DraftChooser` that learns.

    A token is kept if the token it follows is, times how often tokens of its source, temperature, place and rank were.
    All places of a draft model's chain are alike, as are those of a look-up; a long match is a source of its own. A
    length is chosen as if all rows of the step had a draft of the same size.

    Args:
        metrics: Gives the newest step times of the target.
        draft_metrics: The same of a draft model in the target's process; each of its draft tokens takes a step.
    """

    def __init__(
        self,
        metrics: Callable[[], Mapping[str, float]],
        draft_metrics: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self._metrics, self._draft_metrics = metrics, draft_metrics
        self._acceptance = Acceptance()
        self._lengths: dict[_Load, int] = {}
        self._is_new: set[_Load] = set()
        self._num_skips: Counter[_Load] = Counter()
        self._num_steps = 0
        self._review()

    def begin_step(self) -> None:
        """Count a step of the target."""
        self._num_steps += 1
        if self._num_steps % REVIEW_STEPS == 0:
            self._review()

    def length(self, draft: Draft, spec: SequenceSpec, num_rows: int) -> int:
        """Return how many of a draft's first tokens are worth verifying in a step of ``num_rows`` sequences."""
        load = self._load(_source(draft), spec, num_rows)
        length = min(self._length(load, _parents(draft), spec, num_rows), len(draft.tokens))
        # Heads that are not worth it have made this draft because own_length asked for a probe.
        is_probe = length < len(draft.tokens) and (self._skips(load) or (draft.source == OF_HEADS and not length))
        return len(draft.tokens) if is_probe else length

    def own_length(self, spec: SequenceSpec, num_rows: int) -> int:
        """Return how many tokens heads, or a draft model in the target's process, should draft for a sequence."""
        bound = MAX_OWN_TOKENS if spec.num_speculative_tokens is None else spec.num_speculative_tokens
        if self._draft_metrics is None:
            load = self._load(OF_HEADS, spec, num_rows)
            length = self._lengths.get(load, bound)
        else:
            load = self._load(MODEL, spec, num_rows)
            length = min(self._length(load, _CHAIN, spec, num_rows), bound)
        return length or (min(PROBE_LENGTH, bound) if self._skips(load) else 0)

    def judge(self, draft: Draft, accepted: Tokens, spec: SequenceSpec) -> None:
        """Learn which tokens of a draft that was verified whole were kept; those after a refused token tell nothing."""
        kept = {-1}
        for i, (parent, place, rank) in enumerate(_nodes_of(_parents(draft))[: len(draft.tokens)]):
            if parent in kept:
                is_kept = accepted[place : place + 1] == draft.tokens[i : i + 1]
                self._acceptance.learn(_kind(_source(draft), spec, place, rank), is_kept, 1)
                if is_kept:
                    kept.add(i)

    def _review(self) -> None:
        self._times = step_times(self._metrics())
        self._draft_times = StepTimes() if self._draft_metrics is None else step_times(self._draft_metrics())
        self._is_new.clear()

    def _skips(self, load: _Load) -> bool:
        """Count a draft that is not verified whole; return whether it is this one's turn."""
        self._num_skips[load] += 1
        return self._num_skips[load] % PROBE_EVERY == 0

    def _length(self, load: _Load, parents: Tokens, spec: SequenceSpec, num_rows: int) -> int:
        """Return the length for a load, chosen once between two reviews."""
        if load not in self._is_new:
            self._is_new.add(load)
            kept, seconds = self._estimate(load.source, parents, spec, num_rows)
            self._lengths[load] = best_length(kept, seconds, self._lengths.get(load, 0))
        return self._lengths[load]

    def _estimate(
        self, source: str, parents: Tokens, spec: SequenceSpec, num_rows: int
    ) -> tuple[list[float], list[float]]:
        """Return the probability that each token is kept, and the seconds of a round by the tokens it verifies."""
        shares = {-1: 1.0}
        for i, (parent, place, rank) in enumerate(_nodes_of(parents)):
            prior = kept_share(place if source == OF_HEADS else 0, rank)
            shares[i] = shares[parent] * self._acceptance.rate(_kind(source, spec, place, rank), prior)
        del shares[-1]
        sizes = range(len(shares) + 1)
        seconds = [self._times.at(num_rows, num_rows * (1 + size)) if self._times else 1.0 for size in sizes]
        if source == MODEL and self._times and self._draft_times:
            draft_s = self._draft_times.at(num_rows, num_rows)
            seconds = [target_s + size * draft_s for size, target_s in enumerate(seconds)]
        return list(shares.values()), seconds

    @staticmethod
    def _load(source: str, spec: SequenceSpec, num_rows: int) -> _Load:
        return _Load(source, kind_of(spec), spec.num_speculative_tokens, num_rows.bit_length())


class _Load(NamedTuple):
    """What a length depends on; rows are counted in octaves."""

    source: str
    temperature: float
    bound: int | None
    octave: int


def _source(draft: Draft) -> str:
    """Return the name by which a draft's acceptance is kept."""
    if draft.source in OFFERED:
        return MODEL
    source = "ngram" if draft.source == "prediction" else draft.source
    return "long ngram" if source == "ngram" and len(draft.tokens) >= LONG_MATCH else source


def _kind(source: str, spec: SequenceSpec, place: int, rank: int) -> Hashable:
    return source, kind_of(spec), place if source == OF_HEADS else 0, rank


def _parents(draft: Draft) -> Tokens:
    """Return what each token follows. Chains but those of heads are as long as any: their places are alike."""
    return draft.parents or (_CHAIN[: len(draft.tokens)] if draft.source == OF_HEADS else _CHAIN)
