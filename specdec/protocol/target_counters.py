"""What a target has done, counted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from specdec.core.drafts import OFFERED, DraftSource

LOOK_UPS = frozenset[DraftSource](("lookup", "prediction"))
"""Drafts that were found in a text."""


@dataclass(slots=True)
class SourceCounters:
    """Drafts of one source."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class TargetCounters:
    """What a target has done since it started.

    Attributes:
        num_drafts: Rounds that verified at least one draft token.
        num_accepted_per_position: Accepted tokens by their place in the draft, first to last.
        num_stale_offers: Offers dropped before anything of them was verified: they did not fit the log, or had to make
            room for newer ones.
        num_used_offers: Offers of which something was verified.
        num_late_rounds: Rounds without a draft though one was planned, and was not the first.
        draft_wait_s: Seconds for which rows were held back for a draft.
        num_branch_hits: Rounds whose outcome was among those prepared, in an offer with branches that was there when
            the next draft was chosen. Counted when the next round is decided; the last one of a sequence is not.
        num_branch_misses: Rounds for which there were such offers, and none of them for the outcome.
        by_source: Of drafts, draft tokens and accepted ones, those of each source; ``model`` is the draft model.
        num_failed_steps: Steps that failed as a whole, and were contained.
        num_suspects: Sequences that were put apart because a step with them had failed, here or elsewhere.
        num_errors: Sequences that ended with an error.
    """

    num_steps: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    num_offers: int = 0
    num_used_offers: int = 0
    num_stale_offers: int = 0
    num_late_rounds: int = 0
    draft_wait_s: float = 0.0
    num_branch_hits: int = 0
    num_branch_misses: int = 0
    num_failed_steps: int = 0
    num_suspects: int = 0
    num_errors: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    by_source: defaultdict[str, SourceCounters] = field(default_factory=lambda: defaultdict(SourceCounters))

    def count_round(self, num_drafted: int, num_accepted: int, num_committed: int, source: DraftSource) -> None:
        """Count one verification; ``num_accepted`` are those that were committed."""
        self.num_rounds += 1
        self.num_committed_tokens += num_committed
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        of_source = self.by_source["model" if source in OFFERED else source]
        of_source.num_drafts += 1
        of_source.num_draft_tokens += num_drafted
        of_source.num_accepted_tokens += num_accepted
        per_position = self.num_accepted_per_position
        per_position.extend([0] * (num_accepted - len(per_position)))
        for i in range(num_accepted):
            per_position[i] += 1
