"""The router's state machine: the log of record, and the relay between the workers. It never decides a token."""

from __future__ import annotations

import logging
from collections import Counter

from msgspec.structs import replace

from specdec.core.log import Extension
from specdec.core.messages import (
    DRAFTER,
    Ack,
    Alive,
    Cancel,
    Commit,
    End,
    Epoch,
    Gone,
    Live,
    Message,
    NewTokens,
    Offer,
    Open,
    Plan,
    PlanUpdate,
    Resync,
    Submit,
    Verdict,
    Want,
)
from specdec.core.types import UNKNOWN, Fingerprints, Finish
from specdec.drafting.plans import PlanController, Planner, Planning, WorkerKind
from specdec.protocol.dispatcher import Dispatcher
from specdec.protocol.ingress import MODEL_REPLACED, NUMERIC_CONTRACT
from specdec.protocol.leases import LeasedSequences, Outbox, Times, Tracer, label
from specdec.protocol.sessions import Quarantine, RouterCounters, Session, WorkerLink

logger = logging.getLogger(__name__)

_AT_FAULT = "the worker that decoded this sequence died each time that it was tried alone"
_OTHER_HISTORY = "each time that this sequence was opened again, its target had another history of it"


class RouterMachine:
    """Holds the log of record per sequence, places, relays, plans and recovers.

    A plain state machine: messages in by ``receive``, timers by ``step``, messages out by ``take_outbox``. Workers come
    and go by ``worker_joined`` and ``worker_lost``: whoever carries the messages tells when a link begins and ends.

    Args:
        name: By which its peers know it.
        planner: Gives each sequence its plan, once; or a controller, which may change it.
        times: The protocol's clock.
        fingerprints: What decides tokens, and what they mean; sequences of others are refused (rule 14).
        max_reopens: Most times that a sequence is opened again after failures of its own, and most times in a row
            because a worker has another history of it (rule 16).

    Attributes:
        tracer: Begins spans of sequences whose request is traced; None where nobody traces.
        workers: Those that can be reached.
    """

    def __init__(
        self,
        name: str,
        planner: Planner | PlanController,
        times: Times,
        *,
        fingerprints: Fingerprints = UNKNOWN,
        max_reopens: int = 3,
    ) -> None:
        self.name = name
        self.fingerprints = fingerprints
        self.is_draining = False
        self.tracer: Tracer | None = None
        self.counters = RouterCounters(num_worker_deaths=Counter({"target": 0, DRAFTER: 0}))
        self.planning = Planning(planner)
        self._times = times
        self._sessions: LeasedSequences[Session] = LeasedSequences(times.tombstone_s)
        self._outbox = Outbox()
        self.quarantine = Quarantine(name, max_reopens)
        self._dispatcher = Dispatcher(
            name,
            self._outbox,
            self.counters,
            self.quarantine,
            times.lease_s,
            fingerprints,
        )
        self.workers = self._dispatcher.workers
        self._renewed_s = float("-inf")

    def set_times(self, times: Times) -> None:
        """Go by other times from now on, for the sequences that are open, too."""
        self._times = times
        self._dispatcher.lease_s = times.lease_s
        self._renewed_s = float("-inf")  # workers learn the new lease before the old one runs out
        for session in self._sessions:
            session.lease_s = times.lease_s

    def set_planner(self, planner: Planner | PlanController, now_s: float) -> None:
        """Plan by another planner from now on, also for the sequences that are open."""
        self.planning = Planning(planner)
        for session in self._sessions:
            if session.is_planned:
                self._replan(session, self.planning.opened(session.seq, session.spec), now_s)

    def take_outbox(self) -> dict[str, list[Message]]:
        """Messages since the last call, by worker and ingress."""
        return self._outbox.take()

    def worker_metrics(self) -> dict[str, tuple[WorkerKind, dict[str, float]]]:
        """The newest counters of every live worker, by its name."""
        return self.workers.worker_metrics()

    def metrics(self) -> dict[str, float]:
        """The router's counters, and the controller's choices and estimates, by name."""
        planned = self.planning.metrics()
        lacking = sum(session.lacks_drafter for session in self._sessions) + planned.get("num_without_drafter", 0.0)
        own = {"num_sessions": float(len(self._sessions)), "is_draining": float(self.is_draining)}
        return {**planned, **own, **self.counters.metrics(), "num_without_drafter": lacking}

    def lacks_drafter(self) -> bool:
        """Whether a sequence needs a drafter, and there is none."""
        return self.metrics()["num_without_drafter"] > 0

    def drain(self, now_s: float) -> None:
        """Take no sequences any more; those that are here go on to their end (rule 15)."""
        self.is_draining = True

    @property
    def is_drained(self) -> bool:
        """Whether it drains, and holds no sequence."""
        return self.is_draining and not len(self._sessions)

    def worker_joined(self, name: str, kind: WorkerKind, now_s: float) -> None:
        """A worker can be reached; sessions without one of its kind are opened on it."""
        worker = self.workers.add(name, kind)
        for session in self._sessions:
            for link in session.links:
                if link.worker == name:  # it was reached again: what it held may be gone
                    worker.num_links += 1
                    self._dispatcher.open(session, link, now_s)
                elif link.kind == kind:
                    self._dispatcher.place_missing(session, link, now_s)
        self._dispatcher.try_suspects(now_s)
        self._dispatcher.hand_over(self._sessions, now_s)

    def worker_lost(self, name: str, now_s: float) -> None:
        """A worker is gone: its sessions are opened elsewhere from the log, or wait for the next worker (rule 8)."""
        worker = self.workers.get(name)
        is_only_one = worker is not None and worker.metrics.get("num_sequences", 0.0) <= 1
        if worker is not None and not worker.is_draining:
            self.counters.num_worker_deaths[worker.kind] += 1
        self.workers.remove(name)
        self.planning.lost(name)
        for session in self._dispatcher.lose(name, self._sessions, now_s, is_only_one=is_only_one):
            self._finish(session, "error", _AT_FAULT)
        self._dispatcher.try_suspects(now_s)

    def receive(self, message: Message, now_s: float) -> None:
        """Take in one message."""
        match message:
            case Submit():
                self._on_submit(message, now_s)
            case Want():
                self._on_want(message, now_s)
            case Cancel(seq, attempt):
                self._end(self._sessions.drop(seq, Epoch(attempt, 0), now_s))
            case Verdict():
                self._on_verdict(message, now_s)
            case Offer():
                self._on_offer(message)
            case Resync():
                self._on_resync(message, now_s)
            case Alive():
                self._on_alive(message, now_s)

    def unsendable(self, message: Message, reason: str, now_s: float) -> None:
        """A message is too long to be sent: its sequence ends with an error."""
        session = self._sessions.get(message.seq) if isinstance(message, Open) else None
        if session is not None and session.finish is None:
            self._finish(session, "error", reason)

    def step(self, now_s: float) -> bool:
        """Timers: leases, renewals, repeats, reviews. To be called in each turn of its driver; False."""
        for session in self._sessions.expire(now_s):
            self._end(session)
        self._dispatcher.try_suspects(now_s)
        if self.planning.take_turn(now_s):
            self._review(now_s)
        if now_s < self._renewed_s + self._times.renew_interval_s:
            return False
        self._renewed_s = now_s
        self._end_replaced()
        self._send_away(now_s)
        for session in self._sessions:
            for link in session.links:
                self._dispatcher.place_missing(session, link, now_s)
        self._dispatcher.hand_over(self._sessions, now_s)
        self._renew(now_s)
        return False

    def _end_replaced(self) -> None:
        """If all targets have another model or other bits, nobody can go on with a sequence (rules 14 and 17)."""
        for session in self._sessions:
            link = session.target
            if session.finish is not None or link.worker is not None:
                continue
            if self.workers.is_replaced(link.kind):
                self._finish(session, "error", MODEL_REPLACED)
            elif self.workers.is_replaced(link.kind, session.refused_by):
                self._finish(session, "error", NUMERIC_CONTRACT)

    def _send_away(self, now_s: float) -> None:
        """What has no target here while this router drains is for another router: no new worker links with this one."""
        for session in self._sessions if self.is_draining else ():
            link = session.target
            if session.finish is None and link.worker is None and self.workers.least_loaded(link.kind) is None:
                self._outbox.put(session.ingress, Gone(session.seq, session.epoch.attempt, "draining"))
                self._end(self._sessions.drop(session.seq, session.epoch, now_s))

    def _review(self, now_s: float) -> None:
        """Ask the controller, and carry out what it has changed."""
        sessions = [session for session in self._sessions if session.is_planned and session.target.worker is not None]
        placements = {session.seq: (str(session.target.worker), session.drafter.worker) for session in sessions}
        for seq, plan in self.planning.review(placements, now_s).items():
            session = self._sessions.get(seq)
            if session is not None and session.is_planned:
                self._replan(session, plan, now_s)

    def _replan(self, session: Session, plan: Plan, now_s: float) -> None:
        """Carry out a new plan: open the sequence on a drafter, or close it there, if it needs one now, or no more."""
        session.plan = plan
        if session.drafter not in session.links and session.drafter.worker is not None:
            self._dispatcher.close(session, session.drafter)
        for link in session.links:
            if link is not session.target and link.worker is None:
                self._dispatcher.place(session, link, now_s)
            else:
                self._send_plan(session, link)

    def _send_plan(self, session: Session, link: WorkerLink) -> None:
        link.is_replanned = True
        self._dispatcher.send(link, PlanUpdate(session.seq, session.link_epoch(link), session.plan))

    def _renew(self, now_s: float) -> None:
        live: dict[str, list[tuple[str, Epoch]]] = {name: [] for name, _ in self.workers}
        for session in self._sessions:
            for link in session.links:
                if link.worker is not None and now_s - link.opened_s > self._times.renew_grace_s:
                    live.setdefault(link.worker, []).append((session.seq, session.link_epoch(link)))
                    if link.is_replanned:  # nobody acknowledges a plan: it is repeated as long as it holds
                        self._send_plan(session, link)
            if session.drafter in session.links and session.drafter.length < len(session.log):
                self._commit(session, session.drafter.length)
        for name, entries in live.items():
            self._outbox.put(name, Live(self.name, tuple(entries), self._times.lease_s))

    def _on_submit(self, message: Submit, now_s: float) -> None:
        held = self._sessions.get(message.seq)
        if held is None or held.epoch.attempt < message.attempt:
            why = self._refusal(message)
            if why:
                self._outbox.put(message.ingress, Gone(message.seq, message.attempt, why))
                return
        session = Session(message, Plan(), self._times.lease_s)
        if self._sessions.admit(session, now_s) is None:
            return
        if held is not None:
            self._end(held)
        session.begin_span(self.tracer)
        if session.is_planned:
            session.plan = self.planning.opened(message.seq, message.spec)
        for link in session.links:
            self._dispatcher.place(session, link, now_s)

    def _refusal(self, message: Submit) -> str:
        """Why a sequence is not taken; empty if it is."""
        decision = self.fingerprints.decision
        if message.decision and decision and message.decision != decision:
            self.counters.num_refused_model += 1
            return "model"
        self.counters.num_refused_draining += self.is_draining
        return "draining" if self.is_draining else ""

    def _on_want(self, message: Want, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        if session is None or session.epoch.attempt < message.attempt:
            self._outbox.put(message.ingress, Gone(message.seq, message.attempt))
        elif session.epoch.attempt == message.attempt:
            self._sessions.renew(session, now_s)
            if session.client_length < message.have <= len(session.log):
                session.client_length = message.have
                session.notes = session.notes.last(len(session.log) - message.have)
            prompt_logprobs = session.notes.prompt_logprobs
            if prompt_logprobs is not None and now_s < session.prompt_sent_s + self._times.repeat_after_s(
                len(prompt_logprobs)
            ):
                return  # it is long, and on its way
            session.prompt_sent_s = now_s
            self._send_tokens(session, session.client_length)

    def _on_verdict(self, message: Verdict, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        if session is None or session.finish is not None or message.epoch != session.link_epoch(session.target):
            self.counters.num_dropped_messages += 1
            return
        before = len(session.log)
        if not self._takes(session, message):
            self._reopen(session, session.target, "another history", now_s)
            return
        if len(session.log) > before:
            session.target.num_mismatches = 0
        if message.tokens and session.spec.keeps_numeric:
            session.numeric = session.numeric or message.numeric
        if message.tokens or message.finish is not None:
            self.quarantine.leave(session)
        else:
            session.is_tried = True
        new = message.notes.last(len(session.log) - before)
        session.notes = session.notes + new
        if new.prompt_logprobs is not None:
            session.prompt_sent_s = now_s
        if session.span is not None:
            session.span.add(num_tokens=len(new.provenance))
        self.planning.decided(session.seq, new, now_s)
        if message.finish is None and session.drafter in session.links:
            self._commit(session, session.drafter.sent)  # first: what is late here makes the next drafts late
        self._dispatcher.send(session.target, Ack(message.seq, message.epoch, len(session.log)))
        if message.finish is not None:
            self._finish(session, message.finish, message.reason)
        elif session.sent_length < len(session.log):
            self._send_tokens(session, session.sent_length)

    def _reopen(self, session: Session, link: WorkerLink, why: str, now_s: float) -> None:
        """Open a session anew on a worker that has another history of it; not without end (rule 16).

        A target that never has the right one ends it with an error. A drafter drafts for it no more.
        """
        link.num_mismatches += 1
        if link.num_mismatches <= self.quarantine.max_reopens:
            self._dispatcher.reopen(session, link, why, now_s)
        elif link is session.target:
            self._finish(session, "error", _OTHER_HISTORY)
        else:
            logger.warning("The drafter %s drafts no more for %s: %s", link.worker, label(session), why)
            self._dispatcher.close(session, link)
            session.may_draft = False

    def _takes(self, session: Session, message: Verdict) -> bool:
        """Rule 2: append once, and check. False where another life of the target has decided under this epoch."""
        extension = session.log.extend_to(message.base, message.tokens, message.prefix_hash)
        return extension in (Extension.EXTENDED, Extension.NOTHING_NEW)

    def _on_offer(self, message: Offer) -> None:
        session = self._sessions.get(message.seq)
        if session is None or session.finish is not None or message.epoch != session.link_epoch(session.drafter):
            self.counters.num_dropped_messages += 1
            return
        session.drafter.length = min(message.prefix_hash.length, len(session.log))
        session.drafter.num_mismatches = 0
        epoch = session.link_epoch(session.target)
        self._dispatcher.send(session.target, message if message.epoch == epoch else replace(message, epoch=epoch))

    def _on_resync(self, message: Resync, now_s: float) -> None:
        self.counters.num_resyncs[message.why] += 1
        session, worker = self._sessions.get(message.seq), self.workers.get(message.worker)
        if worker is not None:
            worker.is_draining |= message.why == "draining"
            worker.is_other_model |= message.why == "model"
        if session is None:
            return
        for link in session.links:
            if link.worker == message.worker and message.epoch == session.link_epoch(link):
                if message.why == "numeric":
                    session.refused_by.add(message.worker)
                if message.why in ("draining", "model", "numeric"):
                    self._dispatcher.refused(session, link, message.why, now_s)
                elif message.why == Extension.MISMATCH.value:
                    self._reopen(session, link, message.why, now_s)
                else:
                    self._dispatcher.reopen(session, link, message.why, now_s)

    def _on_alive(self, message: Alive, now_s: float) -> None:
        worker = self.workers.get(message.worker)
        if worker is None:
            return
        worker.metrics, worker.numeric = message.metrics, message.numeric
        was_draining, worker.is_draining = worker.is_draining, bool(message.metrics.get("is_draining"))
        if worker.is_draining and not was_draining:
            self._dispatcher.hand_over(self._sessions, now_s)
        self.planning.reported(message.worker, worker.kind, message.metrics)

    def _commit(self, session: Session, base: int) -> None:
        """Tell the drafter the log from ``base`` on: from what was sent last, and again now and then if it is lost."""
        log, link = session.log, session.drafter
        link.sent = len(log)
        message = Commit(session.seq, session.link_epoch(link), base, log.tail(base), log.prefix_hash())
        self._dispatcher.send(link, message)

    def _send_tokens(self, session: Session, base: int) -> None:
        """Tokens to the ingress, from ``base`` on; the end goes by itself, bound to a prefix hash."""
        prefix_hash, attempt = session.log.prefix_hash(), session.epoch.attempt
        session.sent_length = len(session.log)
        notes = session.notes.last(len(session.log) - base)
        if base < len(session.log) or session.finish is None:
            numeric = "" if session.client_length > session.opened else session.numeric
            tokens, plan = session.log.tail(base), session.plan
            self._outbox.put(
                session.ingress, NewTokens(session.seq, attempt, base, tokens, notes, prefix_hash, plan, numeric)
            )
        if session.finish is not None:
            self._outbox.put(session.ingress, End(session.seq, attempt, prefix_hash, session.finish, session.reason))

    def _finish(self, session: Session, finish: Finish, reason: str) -> None:
        self._dispatcher.close_all(session)
        session.end(finish, reason)
        self.counters.num_sequence_errors += finish == "error"
        self.planning.closed(session.seq)
        self._send_tokens(session, session.sent_length)

    def _end(self, session: Session | None) -> None:
        if session is not None:
            self._dispatcher.close_all(session)
            self.planning.closed(session.seq)
