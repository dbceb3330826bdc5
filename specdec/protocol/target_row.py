"""A sequence on a target: its log, how it came, and the drafts that were offered for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from specdec.protocol.messages import Notes, Offer, Open
from specdec.protocol.offers import Found, foresees
from specdec.protocol.worker import WorkerRow
from specdec.sampling.finish import Ending
from specdec.types import Finish


@dataclass(slots=True, eq=False)
class KeptOffer:
    """An offer that a target holds.

    Attributes:
        is_used: Whether something of it, or of an earlier part of it, was chosen as a draft.
        is_stale: Whether it, or an earlier part of it, was dropped.
    """

    offer: Offer
    is_used: bool = False
    is_stale: bool = False

    def grows_to(self, offer: Offer) -> bool:
        """Whether it is an earlier part of another."""
        return self.offer.mark == offer.mark and self.offer.chain == offer.chain[: len(self.offer.chain)]


class TargetRow(WorkerRow):
    """A sequence on a target.

    Args:
        message: Opens it.
        max_model_len: Longest log of the model, in tokens.

    Attributes:
        place: Those with the least are decided first, and yield last where room is short.
        ending: Where it ends.
        finish: How it ended; None until then.
        needs_candidates: Whether a draft is of no use without what it was drawn from.
        acked: Length up to which the router has the log.
        notes: How the tokens after ``acked`` came.
        offers: The newest offers that may be of use, oldest first.
        dropped: The one that was dropped last, of which later parts may come.
        decided_s: When the step began that decided it last; None before the first time.
        held_s: When it was first held back since; None where it was not.
        told_s: When its verdict was last sent, or is to be.
        is_patient: Whether it waits for offers at all: not since it waited in vain, until the next one comes.
        round_start: Length of the log before its newest round.
        round_before: ... before the round before that one; the same while there was none.
        found: What offers said of the newest round's outcome, as far as they have come.
        found_before: ... of the round before: late ones tell of it until the next round is decided.
    """

    __slots__ = (
        *("acked", "decided_s", "dropped", "ending", "finish", "found", "found_before", "held_s", "is_patient"),
        *("needs_candidates", "notes", "offers", "place", "round_before", "round_start", "told_s"),
    )

    def __init__(self, message: Open, max_model_len: int) -> None:
        super().__init__(message)
        self.place = self.spec.arrival_s, self.seq
        self.ending = Ending.of(self.spec, max_model_len)
        self.finish: Finish | None = self.ending.of_log(self.log.tokens, self.spec.output_start)
        self.needs_candidates = self.spec.sampling.acceptance == "rejection"
        self.acked = len(self.log)
        self.notes = Notes()
        self.offers: deque[KeptOffer] = deque()
        self.dropped: KeptOffer | None = None
        self.decided_s: float | None = None
        self.held_s: float | None = None
        self.told_s = float("-inf")
        self.is_patient = True
        self.round_start = self.round_before = len(self.log)
        self.found = self.found_before = Found.NOTHING

    def keep(self, offer: Offer) -> KeptOffer:
        """Keep a new offer, in place of an earlier part of the same."""
        for kept in self.offers:
            if kept.grows_to(offer):
                kept.offer = offer
                return kept
        kept = KeptOffer(offer)
        if self.dropped is not None and self.dropped.grows_to(offer):
            kept.is_used, kept.is_stale = self.dropped.is_used, self.dropped.is_stale
        self.offers.append(kept)
        return kept

    def judge(self, offer: Offer, *, in_time: bool) -> None:
        """Look for the outcomes of the rounds that an offer was made for among those that it is prepared for.

        Args:
            offer: Of this sequence.
            in_time: Whether it is there as the draft after the newest round is chosen; else it came just now, and may
                be late for the round before, too.
        """
        if not offer.branches or not self.log.has(offer.mark):
            return
        foreseen = Found.IN_TIME if in_time else Found.LATE
        self.found = max(self.found, self._found(offer, foreseen, self.round_start, len(self.log)))
        if not in_time:
            before = self._found(offer, foreseen, self.round_before, self.round_start)
            self.found_before = max(self.found_before, before)

    def _found(self, offer: Offer, foreseen: Found, start: int, end: int) -> Found:
        """What an offer says of the round whose tokens lie between two lengths of the log."""
        length = offer.mark.length
        if length > start or start == end:
            return Found.NOTHING
        is_foreseen = foresees(offer.chain, offer.branches, self.log.tail(length, end), start - length)
        return Found.NOTHING if is_foreseen is None else foreseen if is_foreseen else Found.MISSED

    @property
    def num_output_tokens(self) -> int:
        """Output tokens committed so far."""
        return len(self.log) - self.spec.output_start
