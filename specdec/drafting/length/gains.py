"""What drafts gain in a target's own process: the tokens that are expected of them over the measured time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from specdec.core.drafts import NO_DRAFT, OFFERED, Draft, kept_share, nodes_of
from specdec.core.params import SequenceSpec
from specdec.core.types import Tokens
from specdec.drafting.length.estimates import Acceptance, kind_of
from specdec.drafting.length.step_times import step_times
from specdec.drafting.ngram import LONG_MATCH

PROBE_EVERY = 64
"""One in so many choices is made as if nothing were known, and one in so many rounds without a draft has one."""
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
    """

    def __init__(self, metrics: Callable[[], Mapping[str, float]]) -> None:
        self._metrics = metrics
        self._times = step_times(metrics())
        self._acceptance = Acceptance()
        self._sizes: dict[tuple[float, int | None, int], int] = {}
        self._num_choices = self._num_cuts = self._num_rests = 0

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
            prior = kept_share(place, rank) if draft.source == "medusa" else kept_share(0, rank)
            shares[i] = shares[parent] * self._acceptance.rate(_source(draft, spec, place, rank), prior)
        sizes = [num_rows * (1 + i) for i in range(len(shares))]
        seconds = [self._times.at(num_rows, size) if self._times else 1.0 for size in sizes]
        return [tokens / step_s for tokens, step_s in zip(accumulate(shares.values()), seconds, strict=True)]


def _load(spec: SequenceSpec, num_rows: int) -> tuple[float, int | None, int]:
    """What the best size depends on: the request's temperature and bound, and the rows of a step, in octaves."""
    return kind_of(spec), spec.num_speculative_tokens, num_rows.bit_length()


def _source(draft: Draft, spec: SequenceSpec, place: int, rank: int) -> tuple[str, float, int, int]:
    """What a token's rate is kept by."""
    if draft.source == "medusa":
        return draft.source, kind_of(spec), place, rank
    source = "model" if draft.source in OFFERED else "ngram" if draft.source == "prediction" else draft.source
    if source == "ngram" and len(draft.tokens) >= LONG_MATCH:
        source = "long ngram"
    return source, kind_of(spec), 0, rank


def _parents(draft: Draft) -> Tokens:
    return draft.parents or tuple(range(-1, len(draft.tokens) - 1))
