"""The target's state machine: it commits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from operator import attrgetter

from specdec.protocol.backends import Status, TargetBackend, Verification, VerifyJob
from specdec.protocol.leases import Times
from specdec.protocol.messages import Ack, Message, Notes, Offer, Open, PlanUpdate, Verdict
from specdec.protocol.offers import NO_DRAFT, OFFERS_KEPT, Draft, Found, awaits_token, remaining_draft
from specdec.protocol.target_row import KeptOffer, TargetRow
from specdec.protocol.worker import Gauges, WorkerMachine

LIGHT = (Ack, Offer, PlanUpdate)
"""Messages that touch nothing of a step that is under way: they may be received while its model works."""


@dataclass(slots=True)
class TargetCounters:
    """What a target has done since it started.

    Attributes:
        num_drafts: Rounds that verified at least one draft token.
        num_accepted_per_position: Accepted tokens by their place in the draft, first to last.
        num_stale_offers: Offers dropped before anything of them was verified: they did not fit the log, or had to make
            room for newer ones. Parts of one offer count as one.
        num_late_offers: Offers that came when the round after the one that they foresaw had been decided as well.
        num_branch_hits: Rounds whose outcome was among those prepared, in an offer with branches of which something was
            left when the next draft was chosen. Rounds are judged as long as late offers may come: until the next but
            one is decided, or the sequence has ended; its very last is not.
        num_branch_late: Rounds whose outcome was among those prepared, but only in offers that came after that, or came
            when nothing was left of them.
        num_branch_misses: Rounds for which branches were offered, in time or not, and none of them for the outcome.
    """

    num_steps: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    num_offers: int = 0
    num_stale_offers: int = 0
    num_late_offers: int = 0
    num_branch_hits: int = 0
    num_branch_late: int = 0
    num_branch_misses: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

    def count_round(self, num_drafted: int, num_accepted: int, num_committed: int) -> None:
        """Count one verification; ``num_accepted`` are those that were committed."""
        self.num_rounds += 1
        self.num_committed_tokens += num_committed
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        per_position = self.num_accepted_per_position
        per_position.extend([0] * (num_accepted - len(per_position)))
        for i in range(num_accepted):
            per_position[i] += 1


_Round = tuple[TargetRow, Verification, int, tuple[Found, ...]]
"""A verification that is committed, how many tokens of its run were, and what was offered for rounds before."""

_Choice = tuple[TargetRow, tuple[KeptOffer, ...], list[KeptOffer]]
"""The offers among which a draft was chosen, and those of them of which nothing was left."""


class TargetMachine(WorkerMachine[TargetRow]):
    """Decides tokens and reports them, cumulatively, until they are acknowledged.

    No message makes it undo a token under the current inc (rule 1). It needs none to take its next step while it has
    credit (rule 3).

    Between two steps of the backend its device is idle. So a step commits tokens and chooses drafts; what no next step
    depends on, notes, counts and verdicts, is put off until the outbox is taken, a message comes, somebody asks for the
    counters, or the next step has ended.

    Attributes:
        meanwhile: Around each call of the backend: whoever drives the machine may, from another thread, take its outbox
            and hand it ``LIGHT`` messages until that ends.
    """

    def __init__(self, name: str, backend: TargetBackend, times: Times, gauges: Gauges | None = None) -> None:
        super().__init__(name, times, gauges)
        self._backend = backend
        self._max_model_len = backend.max_model_len
        self._counters = TargetCounters()
        self._untold: list[_Round] = []
        self._choices: list[_Choice] = []
        self.meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def counters(self) -> TargetCounters:
        """What it has done so far."""
        self._catch_up()
        return self._counters

    def receive(self, message: Message, now_s: float) -> None:
        """Take in one message; nothing is forwarded through a model here."""
        if isinstance(message, Offer):  # may come between two steps, where no verdict need be written
            self._judge_choices()
        else:
            self._catch_up()
        super().receive(message, now_s)

    def take_outbox(self) -> dict[str, list[Message]]:
        """Messages since the last call, by router."""
        self._tell_rounds()
        return super().take_outbox()

    def step(self, now_s: float) -> bool:
        """One verification over all sequences that may go on. True if anything was decided or read."""
        self._expire(now_s)
        self._judge_choices()  # those of a step that failed
        rows = [row for row in self._rows if self._may_go_on(row)]
        rows.sort(key=attrgetter("place"))
        deciding: list[TargetRow] = []
        jobs: list[VerifyJob] = []
        for row in rows:
            draft = self._draft(row)
            if draft.tokens or not self._waits(row, now_s):
                deciding.append(row)
                jobs.append(VerifyJob(row.seq, row.log, draft.tokens, row.spec, draft.candidates))
        results: list[Verification] = []
        if jobs:
            with self.meanwhile():
                results = self._backend.verify(jobs)
        self._catch_up()  # with the step before, where nobody did while the backend worked
        for row, result in zip(deciding, results, strict=True):
            if result.status is Status.DECIDED:
                self._commit(row, result, now_s)
        self._repeat(now_s)
        worked = any(result.status is not Status.WAITING for result in results)
        self._counters.num_steps += worked
        return worked

    def report(self) -> dict[str, float]:
        """Counters and gauges for the router; per-position counts are named ``num_accepted_tokens_per_pos/<i>``."""
        counters = self.counters
        figures = super().report()
        for item in fields(counters):
            value = getattr(counters, item.name)
            if isinstance(value, int):
                figures[item.name] = float(value)
        for i, count in enumerate(counters.num_accepted_per_position):
            figures[f"num_accepted_tokens_per_pos/{i}"] = float(count)
        return figures

    def _new_row(self, message: Open, now_s: float) -> TargetRow:
        return TargetRow(message, self._max_model_len)

    def _on_other(self, message: Message, now_s: float) -> None:
        match message:
            case Ack(seq, inc, length):
                row = self._rows.current(seq, inc)
                if row is not None:
                    self._acknowledge(row, length)
            case Offer(seq, inc):
                row = self._rows.current(seq, inc)
                if row is not None:
                    self._take_offer(row, message)

    def _acknowledge(self, row: TargetRow, length: int) -> None:
        length = min(length, len(row.log))
        if length > row.acked:
            row.acked = length
            row.notes = row.notes.last(len(row.log) - length)

    def _dropped(self, row: TargetRow | None) -> None:
        if row is not None:
            self._backend.release(row.seq)

    def _credit(self, row: TargetRow) -> int:
        return row.acked + self._times.credit_tokens - len(row.log)

    def _may_go_on(self, row: TargetRow) -> bool:
        return row.finish is None and self._credit(row) > 0

    def _take_offer(self, row: TargetRow, offer: Offer) -> None:
        """Keep an offer that fits: what a step need not find out does not hold it up."""
        self._counters.num_offers += 1
        self._counters.num_late_offers += offer.mark.length < row.round_start
        row.is_patient = True
        kept = row.keep(offer)
        is_decided = offer.mark.length < len(row.log)
        if is_decided:
            row.judge(offer, in_time=False)
        if is_decided and not self._rest(row, offer).tokens and not awaits_token(offer, row.log):
            self._drop_offer(row, kept)
        elif len(row.offers) > OFFERS_KEPT:
            self._drop_offer(row, row.offers[0])

    def _rest(self, row: TargetRow, offer: Offer) -> Draft:
        return remaining_draft(offer, row.log, needs_candidates=row.needs_candidates)

    def _drop_offer(self, row: TargetRow, kept: KeptOffer) -> None:
        row.offers.remove(kept)
        row.dropped = kept
        self._counters.num_stale_offers += not (kept.is_used or kept.is_stale)
        kept.is_stale = True

    def _draft(self, row: TargetRow) -> Draft:
        """The longest usable draft of the kept offers, cut to what may be committed (rule 6)."""
        best, chosen = NO_DRAFT, None
        offers = row.offers
        if not offers:
            return best
        log, wanted, needs_candidates = row.log, row.plan.num_draft_tokens, row.needs_candidates
        used_up: list[KeptOffer] = []
        for kept in reversed(offers):  # the newest is mostly the longest, and as long as may be
            rest = remaining_draft(kept.offer, log, needs_candidates=needs_candidates)
            if not rest.tokens:
                used_up.append(kept)
            elif len(rest.tokens) >= len(best.tokens):
                best, chosen = rest, kept
                if len(rest.tokens) >= wanted and kept.offer.mark.length <= row.round_start:
                    break
        self._choices.append((row, tuple(offers), used_up))
        if chosen is None:
            return best
        most = min(wanted, self._credit(row) - 1, row.ending.most_length - len(log) - 1)
        chosen.is_used |= most > 0
        return best if len(best.tokens) <= most else best.first(max(most, 0))

    def _waits(self, row: TargetRow, now_s: float) -> bool:
        """Whether a row is held back for an offer: only by plan, never before its first token, in vain only once."""
        if row.plan.draft_wait_s <= 0 or row.decided_s is None or row.plan.num_draft_tokens == 0:
            return False
        if row.spec.max_tokens - row.num_output_tokens <= 1:
            return False
        if row.held_s is None:
            row.held_s = now_s
        since_s = row.held_s if row.plan.mode == "in_turn" else row.decided_s
        row.is_patient = row.is_patient and now_s < since_s + row.plan.draft_wait_s
        return row.is_patient

    def _commit(self, row: TargetRow, result: Verification, now_s: float) -> None:
        """Decide; of what a next step depends on nothing is left to do."""
        run, row.round_before, row.round_start = result.run, row.round_start, len(row.log)
        count, row.finish = row.ending.walk(row.round_start, run)
        settled = (row.found_before, row.found) if row.finish else (row.found_before,)
        row.found_before, row.found = row.found, Found.NOTHING
        row.log.extend(run if count == len(run) else run[:count])
        row.decided_s, row.told_s, row.held_s = now_s, now_s, None
        if row.finish is not None:
            self._backend.release(row.seq)
        self._untold.append((row, result, count, settled))

    def _catch_up(self) -> None:
        """Do all that was put off."""
        self._judge_choices()
        self._tell_rounds()

    def _judge_choices(self) -> None:
        """Judge the newest rounds by the offers that there were, and drop those that are of no use any more."""
        choices, self._choices = self._choices, []
        for row, offers, used_up in choices:
            for kept in offers:
                row.judge(kept.offer, in_time=True)
            for kept in used_up:
                if not awaits_token(kept.offer, row.log):
                    self._drop_offer(row, kept)

    def _tell_rounds(self) -> None:
        """Write verdicts, which readers wait for."""
        if not self._untold:
            return
        rounds, self._untold = self._untold, []
        for row, result, count, found in rounds:
            self._counters.num_branch_hits += found.count(Found.IN_TIME)
            self._counters.num_branch_late += found.count(Found.LATE)
            self._counters.num_branch_misses += found.count(Found.MISSED)
            num_accepted = min(result.num_accepted, count)
            how, num_drafted = "a" * num_accepted, [0] * (count - 1) + [result.num_drafted]
            if count > num_accepted:
                full = num_accepted == result.num_drafted
                how += "p" if not result.num_drafted else "b" if full else "c"
            logprobs = None if result.logprobs is None else result.logprobs[:count]
            row.notes = row.notes + Notes(how, tuple(num_drafted), logprobs, result.prompt_logprobs)
            self._counters.count_round(result.num_drafted, num_accepted, count)
            self._tell(row)

    def _repeat(self, now_s: float) -> None:
        """Rule: a verdict is repeated until acknowledged, by a paused row too, and with its finish until Close."""
        for row in self._rows:
            unacknowledged = row.finish is not None or len(row.log) > row.acked
            if unacknowledged and now_s >= row.told_s + self._times.repeat_s:
                row.told_s = now_s
                self._tell(row)

    def _tell(self, row: TargetRow) -> None:
        tokens = row.log.tail(row.acked)
        verdict = Verdict(row.seq, row.inc, row.acked, tokens, row.notes, row.log.mark(), row.finish)
        self._outbox.put(row.router, verdict)
