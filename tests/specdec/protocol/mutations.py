"""Each rule of the protocol, switched off in the real machines.

A mutation patches classes of the real code through ``pytest.MonkeyPatch``; nothing in the production code knows of it.
The first ten are the rules one would think of, the others those that only random schedules taught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from specdec.core.log import PrefixHash, TokenLog
from specdec.core.messages import End, Epoch, Live, Message, NewTokens, Notes, Offer, Resync, Verdict
from specdec.core.params import StopCondition
from specdec.protocol.dispatcher import Dispatcher
from specdec.protocol.draft_sequence import DraftSequence
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine, Request
from specdec.protocol.leases import LeasedSequences
from specdec.protocol.router import RouterMachine
from specdec.protocol.sessions import Session, WorkerLink
from specdec.protocol.target import TargetMachine
from specdec.protocol.target_sequence import TargetSequence
from specdec.protocol.worker import WorkerMachine, WorkerSequence
from tests.specdec.protocol.scripted import ScriptedTarget

Mutation = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(mutate: Mutation) -> Mutation:
    MUTATIONS[mutate.__name__] = mutate
    return mutate


@mutation
def no_rewind(patch: pytest.MonkeyPatch) -> None:
    """Rule 1: no message shortens the target's log. Off: Ack does."""

    def acknowledge(self: TargetMachine, sequence: TargetSequence, length: int) -> None:
        length = min(length, len(sequence.log))
        sequence.log = TokenLog(sequence.log.tail(0, length))
        sequence.acked, sequence.notes = length, Notes()

    patch.setattr(TargetMachine, "_acknowledge", acknowledge)


@mutation
def append_once(patch: pytest.MonkeyPatch) -> None:
    """Rule 2: tokens are taken by position."""

    def takes(self: RouterMachine, session: Session, message: Verdict) -> bool:
        session.log.extend(message.tokens)
        return True

    patch.setattr(RouterMachine, "_takes", takes)


@mutation
def credit(patch: pytest.MonkeyPatch) -> None:
    """Rule 3: at most so many tokens past the last Ack."""
    patch.setattr(TargetMachine, "_credit", lambda self, sequence: 1000)


@mutation
def idempotent_open(patch: pytest.MonkeyPatch) -> None:
    """Rule 4: Open of the epoch already held changes nothing."""
    admit = LeasedSequences.admit

    def admit_again(self: LeasedSequences[Any], sequence: Any, now_s: float) -> Any:
        held = self.get(sequence.seq)
        if held is not None and held.epoch == sequence.epoch:
            self._sequences.pop(sequence.seq)
        return admit(self, sequence, now_s)

    patch.setattr(LeasedSequences, "admit", admit_again)


@mutation
def tombstones(patch: pytest.MonkeyPatch) -> None:
    """Rule 4: what was closed or ran out does not come back under the same or an older epoch."""
    patch.setattr(LeasedSequences, "_is_buried", lambda self, seq, epoch, now_s: False)


@mutation
def leases(patch: pytest.MonkeyPatch) -> None:
    """Rule 5: what nobody renews is freed."""
    patch.setattr(LeasedSequences, "expire", lambda self, now_s: [])


@mutation
def epoch(patch: pytest.MonkeyPatch) -> None:
    """Identities: workers and router compare epoch."""
    admit, drop, on_verdict = LeasedSequences.admit, LeasedSequences.drop, RouterMachine._on_verdict

    def admit_any(self: LeasedSequences[Any], sequence: Any, now_s: float) -> Any:
        held = self.get(sequence.seq)
        if held is not None and held.epoch != sequence.epoch:
            self._sequences.pop(sequence.seq)
        return admit(self, sequence, now_s)

    def drop_any(self: LeasedSequences[Any], seq: str, epoch: Epoch, now_s: float) -> Any:
        held = self.get(seq)
        return drop(self, seq, epoch if held is None else max(epoch, held.epoch), now_s)

    def take_any(self: RouterMachine, message: Verdict, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        epoch = message.epoch if session is None else session.link_epoch(session.target)
        on_verdict(self, replace(message, epoch=epoch), now_s)

    patch.setattr(LeasedSequences, "admit", admit_any)
    patch.setattr(LeasedSequences, "drop", drop_any)
    patch.setattr(LeasedSequences, "current", lambda self, seq, epoch: self.get(seq))
    patch.setattr(RouterMachine, "_on_verdict", take_any)


@mutation
def cumulative(patch: pytest.MonkeyPatch) -> None:
    """A verdict carries every unacknowledged token. Off: each token is sent once."""
    told: dict[tuple[str, Epoch], int] = {}

    def tell_once(self: TargetMachine, sequence: TargetSequence, now_s: float) -> None:
        sequence.sent_s = now_s
        base = max(sequence.acked, told.get((sequence.seq, sequence.epoch), 0))
        told[sequence.seq, sequence.epoch] = len(sequence.log)
        tokens, notes = sequence.log.tail(base), sequence.notes.last(len(sequence.log) - base)
        prefix_hash = sequence.log.prefix_hash()
        self._outbox.put(
            sequence.router,
            Verdict(sequence.seq, sequence.epoch, base, tokens, notes, prefix_hash, sequence.finish, sequence.reason),
        )

    patch.setattr(TargetMachine, "_send_verdict", tell_once)


@mutation
def preempted(patch: pytest.MonkeyPatch) -> None:
    """Rule 7: a preempted or queued sequence is kept, not called unknown."""
    step = TargetMachine.step

    def step_and_evict(self: TargetMachine, now_s: float) -> bool:
        if not isinstance(self._backend, ScriptedTarget):  # with a draft model in its process
            return step(self, now_s)
        self._backend.waiting = set()
        worked = step(self, now_s)
        for seq in sorted(self._backend.waiting):
            sequence = self._sequences.get(seq)
            assert sequence is not None
            self._sequences.drop(seq, sequence.epoch, now_s)
            self._resync(sequence.router, seq, sequence.epoch, "evicted")
        return worked

    patch.setattr(TargetMachine, "step", step_and_evict)


@mutation
def repeat(patch: pytest.MonkeyPatch) -> None:
    """A verdict is repeated until acknowledged, also by a paused or finished sequence."""
    patch.setattr(TargetMachine, "_repeat", lambda self, now_s: None)


def _believed(log: TokenLog, message: Verdict | NewTokens) -> PrefixHash:
    """The prefix hash that a message must have to be taken as it is."""
    return TokenLog((*log.tokens, *message.tokens[len(log) - message.base :])).prefix_hash()


def _believe_verdicts(patch: pytest.MonkeyPatch, *, with_news: bool) -> None:
    takes = RouterMachine._takes

    def takes_unchecked(self: RouterMachine, session: Session, message: Verdict) -> bool:
        has_news = message.base + len(message.tokens) > len(session.log)
        if message.base <= len(session.log) and has_news == with_news:
            message = replace(message, prefix_hash=_believed(session.log, message))
        return takes(self, session, message)

    patch.setattr(RouterMachine, "_takes", takes_unchecked)


@mutation
def prefix_hash(patch: pytest.MonkeyPatch) -> None:
    """The router extends its log only if the result has the verdict's prefix hash; if not, it opens under n + 1."""
    _believe_verdicts(patch, with_news=True)


@mutation
def prefix_hash_shorter(patch: pytest.MonkeyPatch) -> None:
    """... and compares the prefix hash of a verdict that brings nothing new, too."""
    _believe_verdicts(patch, with_news=False)


@mutation
def gap(patch: pytest.MonkeyPatch) -> None:
    """A verdict that begins beyond the router's log: the router opens under n + 1. Off: it is ignored."""
    on_verdict = RouterMachine._on_verdict

    def ignore_gaps(self: RouterMachine, message: Verdict, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        if session is not None and message.base <= len(session.log):
            on_verdict(self, message, now_s)

    patch.setattr(RouterMachine, "_on_verdict", ignore_gaps)


@mutation
def ingress_prefix_hash(patch: pytest.MonkeyPatch) -> None:
    """The ingress extends its tokens only if the result has the message's prefix hash; if not, it submits again."""
    on_tokens = IngressMachine._on_tokens

    def believe(self: IngressMachine, request: Request, message: NewTokens, now_s: float) -> None:
        if message.base <= len(request.log):
            message = replace(message, prefix_hash=_believed(request.log, message))
        on_tokens(self, request, message, now_s)

    patch.setattr(IngressMachine, "_on_tokens", believe)


@mutation
def ingress_attempt(patch: pytest.MonkeyPatch) -> None:
    """The ingress drops what carries another attempt than its own."""
    patch.setattr(IngressMachine, "_current", lambda self, seq, attempt: self._requests.get(seq))


@mutation
def end_prefix_hash(patch: pytest.MonkeyPatch) -> None:
    """End carries a prefix hash; the ingress ends only there."""
    receive = IngressMachine.receive

    def believe_end(self: IngressMachine, message: Message, now_s: float) -> None:
        if isinstance(message, End) and message.seq in self._requests:
            message = replace(message, prefix_hash=self._requests[message.seq].log.prefix_hash())
        receive(self, message, now_s)

    patch.setattr(IngressMachine, "receive", believe_end)


@mutation
def finish_on_open(patch: pytest.MonkeyPatch) -> None:
    """Rule 4: a log that is finished when opened gets no further token."""
    patch.setattr(StopCondition, "of_log", lambda self, tokens, output_start: None)


@mutation
def finish_equal(patch: pytest.MonkeyPatch) -> None:
    """Rule 2: finish counts also in a verdict that brings no token."""
    on_verdict = RouterMachine._on_verdict

    def ignore_finish(self: RouterMachine, message: Verdict, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        if session is not None and message.base + len(message.tokens) <= len(session.log):
            message = replace(message, finish=None)
        on_verdict(self, message, now_s)

    patch.setattr(RouterMachine, "_on_verdict", ignore_finish)


@mutation
def live_epoch(patch: pytest.MonkeyPatch) -> None:
    """Live carries (seq, epoch), Resync echoes it, and the router answers only for its current epoch. Off: only seq."""
    on_live, on_resync = WorkerMachine._on_live, RouterMachine._on_resync

    def renew_any(self: WorkerMachine[WorkerSequence], message: Live, now_s: float) -> None:
        sequences = [(seq, self._sequences.get(seq), epoch) for seq, epoch in message.entries]
        entries = tuple((seq, epoch if sequence is None else sequence.epoch) for seq, sequence, epoch in sequences)
        on_live(self, replace(message, entries=entries), now_s)

    def answer_any(self: RouterMachine, message: Resync, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        for link in () if session is None else session.links:
            if link.worker == message.worker:
                on_resync(self, replace(message, epoch=session.link_epoch(link)), now_s)

    patch.setattr(WorkerMachine, "_on_live", renew_any)
    patch.setattr(RouterMachine, "_on_resync", answer_any)


@mutation
def drafter_n(patch: pytest.MonkeyPatch) -> None:
    """A drafter, too, is opened anew under a new n, counted per link."""
    reopen = Dispatcher.reopen

    def reopen_same(self: Dispatcher, session: Session, link: WorkerLink, why: str, now_s: float) -> None:
        link.n -= link.kind == "drafter"
        reopen(self, session, link, why, now_s)

    patch.setattr(Dispatcher, "reopen", reopen_same)


# What these machines promise beyond the rules of the protocol.


@mutation
def release(patch: pytest.MonkeyPatch) -> None:
    """What a backend holds for a sequence goes with its sequence."""
    patch.setattr(TargetMachine, "_dropped", lambda self, sequence: None)
    patch.setattr(DrafterMachine, "_dropped", lambda self, sequence: None)


@mutation
def notes_by_position(patch: pytest.MonkeyPatch) -> None:
    """Notes are taken by position, as the tokens are."""
    patch.setattr(Notes, "last", lambda self, count: self)


@mutation
def agreed(patch: pytest.MonkeyPatch) -> None:
    """A drafter that drops its chain tells its backend from where on the tokens are others."""
    follow = DrafterMachine._follow

    def follow_and_forget(self: DrafterMachine, sequence: DraftSequence, old_length: int) -> None:
        before = sequence.agreed
        follow(self, sequence, old_length)
        sequence.agreed = before

    patch.setattr(DrafterMachine, "_follow", follow_and_forget)


@mutation
def lost_with_its_offers(patch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from a drafter that was given up, though it may live on. Off: its offers are the next one's."""
    on_offer = RouterMachine._on_offer

    def take_old(self: RouterMachine, message: Offer) -> None:
        session = self._sessions.get(message.seq)
        if session is not None:
            message = replace(message, epoch=session.link_epoch(session.drafter))
        on_offer(self, message)

    patch.setattr(RouterMachine, "_on_offer", take_old)
