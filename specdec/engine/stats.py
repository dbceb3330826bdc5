"""What speculation did, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.core.messages import ACCEPTED, Notes


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Counts over any number of sequences; add two to pool them.

    Attributes:
        num_tokens: Output tokens.
        num_rounds: Verifications, with and without a draft; each gives at least one token.
        num_drafts: Verifications of at least one draft token.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens kept.
        fallbacks: Sequences that ran without speculation, by reason.
    """

    num_tokens: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verified draft, the corrected or bonus token included: 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def __add__(self, other: SpecStats) -> SpecStats:
        reasons = {*self.fallbacks, *other.fallbacks}
        return SpecStats(
            self.num_tokens + other.num_tokens,
            self.num_rounds + other.num_rounds,
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            {reason: self.fallbacks.get(reason, 0) + other.fallbacks.get(reason, 0) for reason in sorted(reasons)},
        )

    @staticmethod
    def of(notes: Sequence[Notes], fallback: str | None = None) -> SpecStats:
        """Count the notes that came with a sequence's tokens; ``fallback``: why it ran without speculation, if so."""
        how = "".join(note.how for note in notes)
        num_drafted = [n for note in notes for n in note.num_drafted]
        drafts = [n for n in num_drafted if n]
        # A round that ends in an accepted token was cut there by the end of the sequence.
        num_accepted = sum(letter in ACCEPTED for letter in how)
        num_rounds = len(how) - num_accepted + (how[-1:] in ACCEPTED)
        fallbacks = {} if fallback is None else {fallback: 1}
        return SpecStats(len(how), num_rounds, len(drafts), sum(drafts), num_accepted, fallbacks)
