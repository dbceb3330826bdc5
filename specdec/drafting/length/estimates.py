"""Rates that are estimated from counts, older ones counting less."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from specdec.core.messages import TokenKind, TokenSource, token_kind, token_source
from specdec.core.params import SequenceSpec

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
