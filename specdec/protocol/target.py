"""The target's state machine: it commits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from operator import attrgetter

from msgspec.structs import replace

from specdec.core.backends import Status, TargetBackend, Verification, VerifyJob
from specdec.core.drafts import (
    NO_DRAFT,
    OF_HEADS,
    OFFERED,
    Draft,
    DraftChooser,
    awaits_token,
    remaining_draft,
)
from specdec.core.errors import DeviceLostError, reason_of
from specdec.core.messages import (
    Ack,
    Interval,
    Message,
    Notes,
    Offer,
    Open,
    RoundTimes,
    TokenKind,
    TokenSource,
    Verdict,
    pack_provenance,
)
from specdec.core.tokens import are_ids
from specdec.core.types import PackedLogprobs
from specdec.drafting.ngram import NgramOptions, Reading, TokenDrafter, token_drafter
from specdec.protocol.leases import Times, label, labels, microseconds
from specdec.protocol.target_sequence import DraftTrust, KeptOffer, TargetCounters, TargetSequence
from specdec.protocol.worker import BackendMetrics, LastInterval, StepGroups, WorkerMachine, is_at_fault

logger = logging.getLogger(__name__)

_TOKEN_SOURCES: dict[str, TokenSource] = {
    **dict.fromkeys(("", *OFFERED), TokenSource.MODEL),
    "ngram": TokenSource.NGRAM,
    "prediction": TokenSource.PREDICTION,
    OF_HEADS: TokenSource.HEADS,
}


class TargetMachine(WorkerMachine[TargetSequence]):
    """Decides tokens and reports them, cumulatively, until they are acknowledged.

    No message makes it undo a token under the current epoch (rule 1). It needs none to take its next step while it has
    credit (rule 3). An error of one sequence ends that sequence (rule 13). A step that fails as a whole ends none:
    those that were in it are tried again apart from others (rule 16).
    """

    def __init__(
        self,
        name: str,
        backend: TargetBackend,
        times: Times,
        backend_metrics: BackendMetrics | None = None,
        *,
        fingerprint: str = "",
        numeric: str = "",
        last_interval: LastInterval | None = None,
        last_draft_intervals: Callable[[], Sequence[Interval]] | None = None,
        ngram: NgramOptions | None = None,
        chooser: DraftChooser | None = None,
    ) -> None:
        super().__init__(name, times, backend_metrics, fingerprint=fingerprint, numeric=numeric)
        self._backend = backend
        self._last_interval, self._last_draft_intervals = last_interval, last_draft_intervals
        self._ngram = ngram
        self._chooser = chooser
        self._max_model_len = backend.max_model_len
        self._groups = StepGroups()
        self._num_waiting = 0
        self._reading = Reading()
        self.counters = TargetCounters()

    def step(self, now_s: float) -> bool:
        """One verification over all sequences that may go on. True if anything was decided, read or contained.

        Raises:
            DeviceLostError: The backend can no longer be used.
        """
        self.expire(now_s)
        sequences = in_turns(sequence for sequence in self._sequences if self._may_go_on(sequence))
        self._num_waiting = 0
        self._reading = Reading()
        if self._chooser is not None:
            self._chooser.begin_step()
        worked = self._groups.step(sequences, lambda batch: self._verify(batch, now_s))
        self._repeat(now_s)
        if worked:
            self.counters.num_steps += 1
        return worked

    def metrics(self) -> dict[str, float]:
        """Counters and gauges for the router.

        Per-position counts are named ``num_accepted_tokens_per_pos/<i>``, those of a source of drafts
        ``num_drafts_by_source/<source>`` and so on.
        ``num_waiting_sequences`` found no room in the last step.
        """
        metrics = super().metrics()
        metrics["num_waiting_sequences"] = float(self._num_waiting)
        for item in fields(self.counters):
            value = getattr(self.counters, item.name)
            if isinstance(value, int | float):
                metrics[item.name] = float(value)
        for i, count in enumerate(self.counters.num_accepted_per_position):
            metrics[f"num_accepted_tokens_per_pos/{i}"] = float(count)
        for source, counts in self.counters.by_source.items():
            metrics |= {f"{name}_by_source/{source}": float(count) for name, count in asdict(counts).items()}
        return metrics

    # A step.

    def _may_go_on(self, sequence: TargetSequence) -> bool:
        # What tells of a prompt is long: it is sent once, and nothing follows it until it has arrived.
        is_telling = sequence.notes.prompt_logprobs is not None
        return sequence.finish is None and not is_telling and self._credit(sequence) > 0

    def _credit(self, sequence: TargetSequence) -> int:
        return sequence.acked + self._times.max_unacked_tokens - len(sequence.log)

    def _announce(self, sequences: Sequence[TargetSequence], now_s: float) -> bool:
        """Whether a router still has to learn that some of these sequences are about to be tried.

        Before suspects are tried their router hears of it by verdicts without tokens, and acknowledges them: if this
        process dies before it, it was not of them. The others go on meanwhile.
        """
        unknown = [sequence for sequence in sequences if not sequence.is_cleared]
        for sequence in unknown:
            if now_s >= sequence.sent_s + self._times.retry_interval_s:
                self._send_verdict(sequence, now_s)
        return bool(unknown)

    def _verify(self, sequences: Sequence[TargetSequence], now_s: float) -> bool:
        """A step of the backend; what goes wrong in it is contained, but for the loss of its device.

        Sequences of which a router has not acknowledged that they are tried have none.
        """
        if self._announce(sequences, now_s):
            return False
        deciding: list[TargetSequence] = []
        jobs: list[VerifyJob] = []
        is_trying = False
        for sequence in sequences:
            is_suspected = sequence.draft_trust is DraftTrust.SUSPECTED
            is_plain = sequence.is_plain or (is_suspected and is_trying)
            draft = NO_DRAFT if is_plain else self._draft(sequence, now_s, len(sequences))
            if draft is not None:
                deciding.append(sequence)
                room = 0 if is_plain else self._room(sequence)
                drafted = draft.tokens, sequence.spec, draft.source
                max_own = self._max_own_tokens(sequence, draft, room, len(sequences))
                job = VerifyJob(sequence.seq, sequence.log, *drafted, room, draft.parents, max_own)
                jobs.append(job)
                is_trying = is_trying or (is_suspected and _may_have_draft(job))
        if not jobs:
            return False
        try:
            results = self._backend.verify(jobs)
        except DeviceLostError:
            raise
        except Exception as error:
            drafted_for = [one for one, job in zip(deciding, jobs, strict=True) if _may_have_draft(job)]
            self._contain(deciding, drafted_for, error)
            return True
        for sequence, job, result in zip(deciding, jobs, results, strict=True):
            if result.status is Status.DECIDED and not are_ids(result.run):
                self._end_with_error(sequence, f"the target decided tokens that it cannot have: {result.run}")
            elif result.status is Status.DECIDED:
                draft = job.proposed if result.own is None else result.own
                draft = NO_DRAFT._replace(source="chain") if result.is_forced else draft
                self._commit(sequence, result, draft, now_s)
            elif result.status is Status.FAILED:
                self._end_with_error(sequence, result.reason)
            elif result.status is Status.SUSPECT:
                had_draft = bool(job.draft) or result.own is not None
                self._suspect([sequence], [sequence] if had_draft else [], result.reason)
        self._num_waiting += sum(result.status is Status.WAITING for result in results)
        return any(result.status is not Status.WAITING for result in results)

    def _commit(self, sequence: TargetSequence, result: Verification, draft: Draft, now_s: float) -> None:
        start, run, source = len(sequence.log), result.run, draft.source
        if not result.num_drafted and self._wants_draft(sequence):
            self.counters.num_late_rounds += 1
        if sequence.held_s is not None:
            self.counters.draft_wait_s += now_s - sequence.held_s
        count, sequence.finish = sequence.ending.walk(start, run)
        sequence.log.extend(run if count == len(run) else run[:count])
        sequence.own_draft = result.next_draft
        if sequence.foreseen is True:
            self.counters.num_branch_hits += 1
        elif sequence.foreseen is False:
            self.counters.num_branch_misses += 1
        sequence.round_start, sequence.foreseen, sequence.held_s = start, None, None
        if sequence.finish is not None:
            self._backend.release(sequence.seq)
        self._groups.passed(sequence)
        if result.num_drafted and sequence.draft_trust is DraftTrust.SUSPECTED:
            sequence.draft_trust = DraftTrust.TRUSTED
        num_accepted = min(result.num_accepted, count)
        num_drafted = [0] * (count - 1) + [result.num_drafted]
        places = min(draft.depth, result.num_drafted) if draft.parents else result.num_drafted
        is_of_tokens = source not in OFFERED and source != OF_HEADS
        if is_of_tokens and result.num_drafted:
            self._judge_token_drafter(sequence, result.num_drafted, result.num_accepted)
        if self._chooser is not None and result.num_drafted == len(draft.tokens) > 0:
            self._chooser.judge(draft, run[: result.num_accepted], sequence.spec)
        logprobs = None if result.logprobs is None else result.logprobs[:count]
        sequence.notes = sequence.notes + Notes(
            _provenance(source, num_accepted, count, places),
            tuple(num_drafted),
            logprobs,
            None if result.prompt_logprobs is None else PackedLogprobs.pack(result.prompt_logprobs),
            result.num_cached_tokens,
            self._round_times(sequence, count, has_own=result.own is not None),
        )
        self.counters.count_round(result.num_drafted, num_accepted, count, source)
        if sequence.span is not None:
            sequence.span.add(
                num_rounds=1,
                num_tokens=count,
                num_draft_tokens=result.num_drafted,
                num_accepted_tokens=num_accepted,
                num_cached_tokens=result.num_cached_tokens,
                step_us=0 if self._last_interval is None else microseconds(self._last_interval()),
            )
        self._send_verdict(sequence, now_s)

    def _round_times(self, sequence: TargetSequence, count: int, has_own: bool) -> tuple[RoundTimes | None, ...]:
        """When the round of ``count`` tokens was worked on, where its request asked: an entry per token."""
        if not sequence.spec.wants_times or self._last_interval is None:
            return ()
        steps = tuple(sequence.draft_intervals)
        sequence.draft_intervals.clear()
        if has_own and self._last_draft_intervals is not None:
            steps = tuple(self._last_draft_intervals())
        return (*[None] * (count - 1), RoundTimes(self._last_interval(), steps))

    # What goes wrong.

    def _contain(
        self, sequences: Sequence[TargetSequence], drafted_for: Sequence[TargetSequence], error: Exception
    ) -> None:
        """A step has failed: who was alone in it twice is at fault, and all others are suspects."""
        self.counters.num_failed_steps += 1
        logger.error("A step of %d sequences failed: %s", len(sequences), labels(sequences), exc_info=error)
        self._suspect(sequences, drafted_for, reason_of(error))

    def _suspect(self, sequences: Sequence[TargetSequence], drafted_for: Sequence[TargetSequence], reason: str) -> None:
        """Try sequences apart whose step failed, or end the one that was alone in it for the second time.

        Suspects have no drafts. A step that failed with drafts is tried without them first, by all that were in it, and
        is no failure of theirs: no draft ends a sequence (rule 9).
        """
        for sequence in sequences:
            self._backend.release(sequence.seq)
        if not drafted_for and len(sequences) == 1 and is_at_fault(sequences[0]):
            self._end_with_error(sequences[0], reason)
            return
        self.counters.num_suspects += len(sequences)
        for sequence in drafted_for:
            self._distrust_drafts(sequence)
        if drafted_for:
            self._groups.gather(sequences)
        else:
            self._groups.divide(sequences)

    def _distrust_drafts(self, sequence: TargetSequence) -> None:
        """A step failed that may have verified a draft of a sequence."""
        if sequence.draft_trust is DraftTrust.TRUSTED:
            sequence.draft_trust = DraftTrust.SUSPECTED
        elif sequence.draft_trust is DraftTrust.SUSPECTED:
            sequence.draft_trust = DraftTrust.OFF
            self.counters.num_drafts_off += 1
            logger.warning("The sequence %s has no drafts any more: steps failed with them", label(sequence))

    def _token_draft(self, sequence: TargetSequence) -> Draft:
        """What a sequence's drafter from tokens proposes; it may be from outside, and what it raises is contained."""
        drafter, room, sequence.has_long_draft = sequence.token_drafter, self._room(sequence), False
        if drafter is None:
            return NO_DRAFT
        try:
            draft = drafter.draft(sequence.log, room, self._reading).first(room)
            sequence.has_long_draft = bool(draft.tokens) and drafter.is_long
            return draft
        except Exception as error:
            self._drop_token_drafter(sequence, error)
            return NO_DRAFT

    def _judge_token_drafter(self, sequence: TargetSequence, num_drafted: int, num_accepted: int) -> None:
        if sequence.token_drafter is None:
            return
        try:
            sequence.token_drafter.judge(num_drafted, num_accepted)
        except Exception as error:
            self._drop_token_drafter(sequence, error)

    def _drop_token_drafter(self, sequence: TargetSequence, error: Exception) -> None:
        sequence.token_drafter = None
        self._token_drafter_failed(label(sequence), error)

    def _token_drafter_failed(self, name: str, error: Exception) -> None:
        self.counters.num_token_drafters_off += 1
        logger.error("The drafter from tokens of %s failed, and is asked no more", name, exc_info=error)

    def _end_with_error(self, sequence: TargetSequence, reason: str) -> None:
        """The error is the sequence's own: it is final, like any other finish (rule 13)."""
        self.counters.num_errors += 1
        logger.warning("The sequence %s ends with an error: %s", label(sequence), reason)
        self._backend.release(sequence.seq)
        self._groups.passed(sequence)
        sequence.finish, sequence.reason, sequence.sent_s = "error", reason, float("-inf")

    def unsendable(self, message: Message, reason: str, now_s: float) -> None:
        """A verdict is too long to be sent: its sequence ends with an error, and tells no log probabilities."""
        sequence = self._sequences.current(message.seq, message.epoch) if isinstance(message, Verdict) else None
        if sequence is not None:
            sequence.notes = replace(sequence.notes, logprobs=None, prompt_logprobs=None)
            self._end_with_error(sequence, reason)

    # Messages.

    def _new_sequence(self, message: Open, now_s: float) -> TargetSequence:
        sequence = TargetSequence(message, self._max_model_len, self._new_token_drafter(message))
        if message.suspects:
            self.counters.num_suspects += 1
            self._groups.suspect(sequence, message.suspects)
        return sequence

    def _new_token_drafter(self, message: Open) -> TokenDrafter | None:
        try:
            return token_drafter(message.spec, self._ngram)
        except Exception as error:  # it may be from outside
            self._token_drafter_failed(message.seq, error)
            return None

    def _on_other(self, message: Message, now_s: float) -> None:
        match message:
            case Ack(seq, epoch, length):
                sequence = self._sequences.current(seq, epoch)
                if sequence is not None:
                    sequence.is_cleared = True
                    self._acknowledge(sequence, length)
            case Offer(seq, epoch):
                sequence = self._sequences.current(seq, epoch)
                if sequence is not None:
                    self._take_offer(sequence, message)

    def _acknowledge(self, sequence: TargetSequence, length: int) -> None:
        length = min(length, len(sequence.log))
        if length > sequence.acked:
            sequence.acked = length
            sequence.notes = sequence.notes.last(len(sequence.log) - length)

    def _dropped(self, sequence: TargetSequence | None) -> None:
        if sequence is not None:
            self._backend.release(sequence.seq)

    def _repeat(self, now_s: float) -> None:
        """Rule: a verdict is repeated until acknowledged, by a paused sequence too, and with its finish until Close."""
        for sequence in self._sequences:
            unacknowledged = sequence.finish is not None or len(sequence.log) > sequence.acked
            num_entries = 0 if sequence.notes.prompt_logprobs is None else len(sequence.notes.prompt_logprobs)
            if unacknowledged and now_s >= sequence.sent_s + self._times.repeat_after_s(num_entries):
                self._send_verdict(sequence, now_s)

    def _send_verdict(self, sequence: TargetSequence, now_s: float) -> None:
        sequence.sent_s = now_s
        tokens, prefix_hash = sequence.log.tail(sequence.acked), sequence.log.prefix_hash()
        verdict = Verdict(
            sequence.seq,
            sequence.epoch,
            sequence.acked,
            tokens,
            sequence.notes,
            prefix_hash,
            sequence.finish,
            sequence.reason,
            self.numeric if sequence.acked == sequence.opened else "",
        )
        self._outbox.put(sequence.router, verdict)

    # Offers.

    def _take_offer(self, sequence: TargetSequence, offer: Offer) -> None:
        """Keep an offer that fits: what a step need not find out does not hold it up."""
        self.counters.num_offers += 1
        sequence.draft_intervals.extend(offer.steps)
        sequence.is_patient = True
        kept = sequence.keep(offer)
        is_decided = offer.prefix_hash.length < len(sequence.log)
        if is_decided and not remaining_draft(offer, sequence.log).tokens and not awaits_token(offer, sequence.log):
            sequence.judge(offer)
            self._drop_offer(sequence, kept)
        elif (superfluous := sequence.superfluous) is not None:
            self._drop_offer(sequence, superfluous)

    def _drop_offer(self, sequence: TargetSequence, kept: KeptOffer) -> None:
        sequence.offers.remove(kept)
        if not kept.is_used:
            self.counters.num_stale_offers += 1

    def _draft(self, sequence: TargetSequence, now_s: float, num_rows: int) -> Draft | None:
        """Return the draft that a sequence has verified in this step, or None if it is held back for an offer.

        A long match goes first, then an offer, then a short match, then the draft of heads: the first of these of
        which any token is worth its time.
        """
        match = self._token_draft(sequence)
        is_long = sequence.has_long_draft and bool(match.tokens)
        offered, kept = self._offered(sequence)
        if not offered.tokens and not is_long and self._waits(sequence, now_s):
            return None
        own = sequence.own_draft.first(self._room(sequence))
        for draft in (match, offered, own) if is_long else (offered, match, own):
            if draft is offered and kept is not None:
                self.counters.num_used_offers += not kept.is_used
                kept.is_used = True
                return draft
            length = len(draft.tokens)
            if length and self._chooser is not None:
                length = self._chooser.length(draft, sequence.spec, num_rows)
            if length:
                return draft.only(range(length))
        return NO_DRAFT

    def _max_own_tokens(self, sequence: TargetSequence, draft: Draft, room: int, num_rows: int) -> int:
        """Return how many tokens the backend itself may draft: none beside a long match."""
        if room <= 0 or (sequence.has_long_draft and draft.tokens):
            return 0
        return room if self._chooser is None else min(room, self._chooser.own_length(sequence.spec, num_rows))

    def _offered(self, sequence: TargetSequence) -> tuple[Draft, KeptOffer | None]:
        """Return the longest draft of the kept offers, cut to what may be verified (rule 6), and its offer."""
        best, best_offer = NO_DRAFT, None
        for kept in reversed([*sequence.offers]):
            rest = remaining_draft(kept.offer, sequence.log)
            sequence.judge(kept.offer)
            if not rest.tokens and not awaits_token(kept.offer, sequence.log):
                self._drop_offer(sequence, kept)
            elif len(rest.tokens) > len(best.tokens):
                best, best_offer = rest, kept
        best = best.first(self._most_offered(sequence))
        return best, best_offer if best.tokens else None

    # The number of draft tokens is the least of: what the plan says of offers, what a chooser finds worth its time, the
    # request's bound (in both), what may be committed, and what the scheduler finds tokens and blocks for.

    def _most_offered(self, sequence: TargetSequence) -> int:
        """Most draft tokens of an offer that are verified."""
        return min(sequence.plan.num_draft_tokens, self._room(sequence))

    def _room(self, sequence: TargetSequence) -> int:
        """Draft tokens that may be committed, and the one after them."""
        return min(self._credit(sequence), sequence.ending.most_length - len(sequence.log)) - 1

    def _wants_draft(self, sequence: TargetSequence) -> bool:
        """Whether a draft is planned for a sequence's next round, and of any use: not for the first, nor the last."""
        if sequence.is_plain or sequence.round_start == len(sequence.log):
            return False
        return self._most_offered(sequence) > 0

    def _waits(self, sequence: TargetSequence, now_s: float) -> bool:
        """Whether a sequence is held back for an offer: in turn, not before its first token, in vain only once."""
        if sequence.plan.mode != "sequential" or sequence.round_start == len(sequence.log):
            return False
        if sequence.spec.max_tokens - sequence.num_output_tokens <= 1:
            return False
        if sequence.held_s is None:
            sequence.held_s = now_s
        sequence.is_patient = sequence.is_patient and now_s < sequence.held_s + sequence.plan.draft_wait_s
        return sequence.is_patient


def _provenance(source: str, num_accepted: int, count: int, num_places: int) -> bytes:
    """Of the tokens of a round: ``count`` were committed, and a draft could have had ``num_places`` accepted."""
    of_round = _TOKEN_SOURCES.get(source, TokenSource.OTHER)
    accepted = bytes([pack_provenance(TokenKind.ACCEPTED, of_round)]) * num_accepted
    if count == num_accepted:
        return accepted
    if not num_places:
        return accepted + bytes([pack_provenance(TokenKind.PLAIN)])
    last = TokenKind.BONUS if num_accepted == num_places else TokenKind.CORRECTED
    return accepted + bytes([pack_provenance(last, of_round)])


def _may_have_draft(job: VerifyJob) -> bool:
    """Whether a draft may be verified with a job: its own, or what its grammar forces."""
    return bool(job.draft) or (job.room > 0 and job.spec.sampling.grammar is not None)


def in_turns(sequences: Iterable[TargetSequence]) -> list[TargetSequence]:
    """Order sequences by owners in turn: each one's first, then each one's second, and so on.

    Those without an owner go by their own order, before every owner's if their priority is below 0.
    """
    ordered = sorted(sequences, key=attrgetter("rank"))
    counts: dict[bytes, int] = {}
    turns: list[tuple[int, float, str]] = []
    for sequence in ordered:
        owner, turn = sequence.spec.owner, sequence.spec.priority
        if owner:
            turn = counts[owner] = counts.get(owner, -1) + 1
        turns.append((turn, sequence.spec.arrival_s, sequence.seq))
    if not counts:
        return ordered
    return [ordered[i] for i in sorted(range(len(ordered)), key=turns.__getitem__)]
