"""Acceptance rates, estimated from counts, older ones counting less; and what a draft gains a target by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from specdec.core.drafts import NO_DRAFT, OF_HEADS, OFFERED, Draft, kept_share, nodes_of
from specdec.core.messages import TokenKind, TokenSource, token_kind, token_source
from specdec.core.params import SequenceSpec
from specdec.core.types import Tokens
from specdec.drafting.length.modes import StepTimes, step_times
from specdec.drafting.ngram import LONG_MATCH

MEMORY = 256.0
"""Trials after which a trial counts 1/e."""
PRIOR_RATE, PRIOR_TRIALS = 0.5, 4.0
"""Before anything was judged a draft token, or a guess, is as often right as wrong."""


@dataclass(frozen=True, slots=True)
class DecayedRate:
    """Successes among trials, both weighted: what is older than ``MEMORY`` trials counts less and less."""

    successes: float = 0.0
    trials: float = 0.0

    def add(self, successes: float, trials: float) -> DecayedRate:
        """With newer counts."""
        kept = self.times(max(0.0, 1 - trials / MEMORY))
        return DecayedRate(kept.successes + successes, kept.trials + trials)

    def times(self, share: float) -> DecayedRate:
        """The same rate, as far as it is known less well."""
        return DecayedRate(self.successes * share, self.trials * share)

    def rate(self, prior: float, weight: float) -> float:
        """The rate, with a prior that counts like ``weight`` trials."""
        return (self.successes + prior * weight) / (self.trials + weight)


class Acceptance:
    """How often draft tokens are kept, by what they have in common: a source, a place, a request's temperature.

    The router's controller and a target that chooses among drafts have one each: what each sees is not the other's.
    """

    def __init__(self) -> None:
        self._rates: defaultdict[Hashable, DecayedRate] = defaultdict(DecayedRate)

    def learn(self, kind: Hashable, num_kept: float, num_judged: float) -> None:
        """Newer tokens of a kind were judged."""
        self._rates[kind] = self._rates[kind].add(num_kept, num_judged)

    def rate(self, kind: Hashable, prior: float = PRIOR_RATE) -> float:
        """Share of a kind that is kept; near ``prior`` until some were judged."""
        return self._rates[kind].rate(prior, PRIOR_TRIALS)

    def num_judged(self, kind: Hashable) -> float:
        """Tokens of a kind that were judged, older ones counting less."""
        return self._rates[kind].trials


def kind_of(spec: SequenceSpec) -> float:
    """A request's temperature, roughly: what is kept of drafts depends on it."""
    return round(2 * spec.sampling.temperature) / 2


def tally(provenance: bytes, num_drafted: Sequence[int]) -> tuple[int, int, int]:
    """Count the notes of some tokens (:class:`specdec.core.messages.Notes`); the last token ends a round.

    Returns:
        Rounds of a sequence; accepted tokens of a draft model; and those that were judged, not what follows a refused
        one. Rounds whose draft was looked up say nothing of a draft model.
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


PROBE_EVERY = 64
"""One in so many choices is made as if nothing were known, and one in so many rounds without a draft has one."""
PROBE_LENGTH = 2
"""Of a draft model's draft where none is worth its time."""
MOST_OWN = 16
"""Longest draft that a draft model in the target's process is asked for where the request names no number."""
REVIEW_EVERY = 32
"""After so many drafts sizes are chosen anew, by newer step times."""

_nodes_of = lru_cache(maxsize=256)(nodes_of)


class DraftGains:
    """A :class:`specdec.core.drafts.DraftChooser` that learns how often tokens are kept.

    A token is as likely to be kept as all that it follows, times how often those of its rank at its place were, by
    source and temperature. Those of a draft model, and of prompt lookup, are alike at all places; a long match is a
    source of its own. All rows of a step are taken to have drafts of the same size.

    Args:
        metrics: Gives the newest step times, as :class:`specdec.engine.timing.StepMetrics` does.
        draft_metrics: The same of a draft model in the target's process, of which each draft token takes a step.
    """

    def __init__(
        self,
        metrics: Callable[[], Mapping[str, float]],
        draft_metrics: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self._metrics = metrics
        self._draft_metrics = draft_metrics
        self._times = step_times(metrics())
        self._draft_times = StepTimes() if draft_metrics is None else step_times(draft_metrics())
        self._acceptance = Acceptance()
        self._sizes: dict[tuple[float, int | None, int], int] = {}
        self._num_choices = self._num_cuts = self._num_rests = self._num_own = 0
        self._own_sizes: dict[tuple[float, int | None, int], int] = {}

    def best(self, drafts: Sequence[Draft], spec: SequenceSpec, num_rows: int) -> Draft:
        """The one that promises the most tokens a second; the first of those that promise as much."""
        some = [draft for draft in drafts if draft.tokens]
        if len(some) > 1:
            self._num_choices += 1
            if self._num_choices % PROBE_EVERY:
                return max(some, key=lambda draft: self._paces(draft, spec, num_rows)[-1])
        return some[0] if some else NO_DRAFT

    def wants_own(self, spec: SequenceSpec, num_rows: int) -> bool:
        """Whether a draft of the backend's own promises more than none; now and then it is wanted to learn of it."""
        if self._sizes.get(_load(spec, num_rows)) != 0:
            return True
        self._num_rests += 1
        return self._num_rests % PROBE_EVERY == 0

    def most_own(self, draft: Draft, spec: SequenceSpec, num_rows: int) -> int:
        """The length that promises the most tokens a second, if that is more than the draft promises.

        Now and then a draft is made where none is worth it, to learn of it.
        """
        most = MOST_OWN if spec.num_speculative_tokens is None else spec.num_speculative_tokens
        if self._draft_metrics is None or not most:
            return 0
        self._num_own += 1
        if self._num_own % REVIEW_EVERY == 1:
            self._times, self._draft_times = step_times(self._metrics()), step_times(self._draft_metrics())
            self._own_sizes = {}
        load, own = _load(spec, num_rows), Draft((0,) * most, source="chain")
        if load not in self._own_sizes:
            paces = self._paces(own, spec, num_rows)
            self._own_sizes[load] = paces.index(max(paces))
        best = self._own_sizes[load]
        if self._num_own % PROBE_EVERY == 0:
            return best or min(most, PROBE_LENGTH)
        if best and draft.tokens:
            is_better = self._paces(own, spec, num_rows)[best] > self._paces(draft, spec, num_rows)[-1]
            return best if is_better else 0
        return best

    def cut(self, draft: Draft, spec: SequenceSpec, num_rows: int) -> Draft:
        """Of the backend's own draft as many of the first tokens as promise the most a second; all of it to learn."""
        if not draft.tokens:
            return draft
        self._num_cuts += 1
        if self._num_cuts % REVIEW_EVERY == 0:
            self._times, self._sizes = step_times(self._metrics()), {}
        load, whole = _load(spec, num_rows), len(draft.tokens)
        if not self._sizes.get(load):
            paces = self._paces(draft, spec, num_rows)
            self._sizes[load] = paces.index(max(paces))
        is_probe = self._num_cuts % PROBE_EVERY == 0
        return draft.only(range(whole if is_probe else min(self._sizes[load] or whole, whole)))

    def judge(self, draft: Draft, accepted: Tokens, spec: SequenceSpec) -> None:
        """Learn what was accepted of a draft that was verified whole; what follows a refused token was not judged."""
        kept = {-1}
        for i, (parent, place, rank) in enumerate(_nodes_of(_parents(draft))):
            if parent in kept:
                is_kept = accepted[place : place + 1] == draft.tokens[i : i + 1]
                self._acceptance.learn(_source(draft, spec, place, rank), is_kept, 1)
                if is_kept:
                    kept.add(i)

    def _paces(self, draft: Draft, spec: SequenceSpec, num_rows: int) -> list[float]:
        """Tokens a second, by how many of a draft's tokens are verified; tokens a round, before steps are timed."""
        shares = {-1: 1.0}
        for i, (parent, place, rank) in enumerate(_nodes_of(_parents(draft))):
            prior = kept_share(place, rank) if draft.source == OF_HEADS else kept_share(0, rank)
            shares[i] = shares[parent] * self._acceptance.rate(_source(draft, spec, place, rank), prior)
        sizes = [num_rows * (1 + i) for i in range(len(shares))]
        seconds = [self._times.at(num_rows, size) if self._times else 1.0 for size in sizes]
        if draft.source in OFFERED and self._times and self._draft_times:
            draft_s = self._draft_times.at(num_rows, num_rows)
            seconds = [step_s + i * draft_s for i, step_s in enumerate(seconds)]
        return [tokens / step_s for tokens, step_s in zip(accumulate(shares.values()), seconds, strict=True)]


def _load(spec: SequenceSpec, num_rows: int) -> tuple[float, int | None, int]:
    """What the best size depends on: the request's temperature and bound, and the rows of a step, in octaves."""
    return kind_of(spec), spec.num_speculative_tokens, num_rows.bit_length()


def _source(draft: Draft, spec: SequenceSpec, place: int, rank: int) -> tuple[str, float, int, int]:
    """What a token's rate is kept by."""
    if draft.source == OF_HEADS:
        return draft.source, kind_of(spec), place, rank
    source = "model" if draft.source in OFFERED else "ngram" if draft.source == "prediction" else draft.source
    if source == "ngram" and len(draft.tokens) >= LONG_MATCH:
        source = "long ngram"
    return source, kind_of(spec), 0, rank


def _parents(draft: Draft) -> Tokens:
    return draft.parents or tuple(range(-1, len(draft.tokens) - 1))
