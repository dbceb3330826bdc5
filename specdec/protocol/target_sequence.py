"""A sequence on a target: its log, how it came, and the drafts that were offered for it.

What a target has done, counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum

from specdec.core.drafts import NO_DRAFT, OFFERED, OFFERS_KEPT, foresees
from specdec.core.messages import Interval, Notes, Offer, Open
from specdec.core.params import StopCondition
from specdec.core.types import Finish
from specdec.drafting.ngram import TokenDrafter
from specdec.protocol.worker import MOST_INTERVALS, WorkerSequence


@dataclass(slots=True, eq=False)
class KeptOffer:
    """An offer that a target holds.

    Attributes:
        is_used: Whether something of it, or of an earlier part of it, was chosen as a draft.
    """

    offer: Offer
    is_used: bool = False

    def grows_to(self, offer: Offer) -> bool:
        """Return whether this is an earlier part of another offer."""
        own = self.offer
        return own.prefix_hash == offer.prefix_hash and own.chain == offer.chain[: len(own.chain)]


class DraftTrust(Enum):
    """Whether a sequence may have drafts (rule 9)."""

    TRUSTED = "trusted"
    """It may."""
    SUSPECTED = "suspected"
    """A step failed that verified a draft of it: in a step at most one such sequence has a draft."""
    OFF = "off"
    """A step failed that verified a draft of it, and of no other suspected sequence: it is decoded plainly."""


class TargetSequence(WorkerSequence):
    """A sequence on a target.

    Args:
        message: Opens it.
        max_model_len: Longest log of the model, in tokens.
        token_drafter: Drafts for it from its tokens; None where nothing does.

    Attributes:
        rank: Among those of one owner the least are decided first, and yield last where room is short.
        ending: Where it ends.
        finish: How it ended; None until then.
        reason: What went wrong, where it ended with an error.
        is_cleared: Whether its router knows that its group is about to be tried; True where no group was named.
        acked: Length up to which the router has the log.
        notes: How the tokens after ``acked`` came.
        offers: The newest offers that may be of use, oldest first.
        draft_intervals: The drafter's steps that were reported since the newest round.
        held_s: When it was first held back since it was decided last; None where it was not.
        sent_s: When its verdict was last sent.
        is_patient: Whether it waits for offers at all: not since it waited in vain, until the next one comes.
        round_start: Length of the log before its newest round.
        foreseen: Whether an offer with branches had foreseen the newest round's outcome; None where there was none.
        own_draft: What the backend proposes after the log.
        draft_trust: Whether it may have drafts.
        has_long_draft: Whether its drafter from tokens was sure of what it proposed last.
    """

    __slots__ = (
        *("acked", "ending", "finish", "foreseen", "held_s", "is_cleared"),
        *("is_patient", "notes", "offers", "own_draft"),
        *("draft_intervals", "draft_trust", "has_long_draft", "opened", "rank", "reason", "round_start"),
        *("token_drafter", "sent_s"),
    )

    def __init__(self, message: Open, max_model_len: int, token_drafter: TokenDrafter | None = None) -> None:
        super().__init__(message)
        self.rank = self.spec.priority, self.spec.arrival_s, self.seq
        self.ending = StopCondition.of(self.spec, max_model_len)
        self.finish: Finish | None = self.ending.of_log(self.spec.output_start, self.log.tail(self.spec.output_start))
        self.reason = ""
        self.is_cleared = not message.suspects
        self.acked = self.opened = len(self.log)
        self.notes = Notes()
        self.offers: deque[KeptOffer] = deque()
        self.draft_intervals: deque[Interval] = deque(maxlen=MOST_INTERVALS)
        self.held_s: float | None = None
        self.sent_s = float("-inf")
        self.is_patient = True
        self.round_start = len(self.log)
        self.foreseen: bool | None = None
        self.token_drafter = token_drafter
        self.own_draft = NO_DRAFT
        self.draft_trust = DraftTrust.TRUSTED
        self.has_long_draft = False

    def end_span(self) -> None:
        """It is held no more."""
        if self.span is not None:
            self.span.end(self.finish or "")

    def keep(self, offer: Offer) -> KeptOffer:
        """Keep a new offer, in place of an earlier part of the same."""
        for kept in self.offers:
            if kept.grows_to(offer):
                kept.offer = offer
                return kept
        kept = KeptOffer(offer)
        self.offers.append(kept)
        return kept

    @property
    def superfluous(self) -> KeptOffer | None:
        """The oldest offer, if there are more than may be kept."""
        return self.offers[0] if len(self.offers) > OFFERS_KEPT else None

    def judge(self, offer: Offer) -> None:
        """Look for the newest round's outcome among those that an offer is prepared for, if it was made before it."""
        length, start = offer.prefix_hash.length, self.round_start
        if not offer.branches or not length <= start < len(self.log) or not self.log.has(offer.prefix_hash):
            return
        is_foreseen = foresees(offer.chain, offer.branches, self.log.tail(length), start - length)
        if is_foreseen is not None:
            self.foreseen = bool(self.foreseen or is_foreseen)

    @property
    def is_plain(self) -> bool:
        """Whether it has no drafts now: a step with it has failed, or all drafts of it are at fault."""
        return bool(self.suspects) or self.draft_trust is DraftTrust.OFF

    @property
    def num_output_tokens(self) -> int:
        """Output tokens committed so far."""
        return len(self.log) - self.spec.output_start


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
        draft_wait_s: Seconds for which sequences were held back for a draft.
        num_branch_hits: Rounds whose outcome was among those prepared, in an offer with branches that was there when
            the next draft was chosen. Counted when the next round is decided; the last one of a sequence is not.
        num_branch_misses: Rounds for which there were such offers, and none of them for the outcome.
        by_source: Of drafts, draft tokens and accepted ones, those of each source; ``model`` is the draft model.
        num_failed_steps: Steps that failed as a whole, and were contained.
        num_suspects: Sequences that were put apart because a step with them had failed, here or elsewhere.
        num_errors: Sequences that ended with an error.
        num_drafts_off: Sequences that have no drafts any more, because steps failed that verified them.
        num_token_drafters_off: Sequences whose drafter from tokens raised an error, and is asked no more.
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
    num_drafts_off: int = 0
    num_token_drafters_off: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    by_source: defaultdict[str, SourceCounters] = field(default_factory=lambda: defaultdict(SourceCounters))

    def count_round(self, num_drafted: int, num_accepted: int, num_committed: int, source: str) -> None:
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
