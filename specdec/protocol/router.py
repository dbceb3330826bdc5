"""The router's state machine: the log of record, and the relay between the workers. It never decides a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from specdec.protocol.leases import LeasedRows, Outbox, Row, Times
from specdec.protocol.marks import Extension, TokenLog
from specdec.protocol.messages import (
    Ack,
    Alive,
    Cancel,
    Close,
    Commit,
    End,
    Finish,
    Gone,
    Inc,
    Live,
    Message,
    NewTokens,
    Notes,
    Offer,
    Open,
    Plan,
    Resync,
    Submit,
    Verdict,
    Want,
)
from specdec.sampling.params import SequenceSpec

WorkerKind = Literal["target", "drafter"]
Planner = Callable[[SequenceSpec], Plan]


@dataclass(slots=True)
class WorkerLink:
    """A session's link to one worker.

    Attributes:
        worker: Its name; None while none is to be had.
        n: Raised whenever the sequence is opened anew on this link.
        length: Length of the log that the worker is known to have.
        sent: Length up to which it was sent.
    """

    kind: WorkerKind
    worker: str | None = None
    n: int = 0
    opened_s: float = 0.0
    length: int = 0
    sent: int = 0


class Session(Row):
    """A sequence's log of record. Its inc is (attempt, 0); each of its links has an ``n`` of its own."""

    __slots__ = ("client_length", "drafter", "finish", "ingress", "log", "notes", "plan", "spec", "target")

    def __init__(self, message: Submit, plan: Plan, lease_s: float) -> None:
        super().__init__(seq=message.seq, inc=Inc(message.attempt, 0), lease_s=lease_s)
        self.ingress = message.ingress
        self.spec = message.spec
        self.plan = plan
        self.log = TokenLog(message.tokens)
        self.client_length = len(self.log)
        self.notes = Notes()
        self.finish: Finish | None = None
        self.target = WorkerLink("target" if message.spec.model == "target" else "drafter")
        self.drafter = WorkerLink("drafter")

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """The links that this session needs: none once it is finished, no drafter where nothing is drafted."""
        if self.finish is not None:
            return ()
        return (self.target, self.drafter) if self.plan.num_draft_tokens else (self.target,)

    def link_inc(self, link: WorkerLink) -> Inc:
        """The inc under which the sequence is open on a link."""
        return Inc(self.inc.attempt, link.n)


@dataclass(slots=True)
class Worker:
    """A worker as this router knows it.

    Attributes:
        report: Its newest counters.
        is_silent: Nothing was heard for too long; it gets no sequence until it is heard again.
    """

    kind: WorkerKind
    heard_s: float
    report: dict[str, float] = field(default_factory=dict)
    is_silent: bool = False


class RouterMachine:
    """Holds the log of record per sequence, places, relays, plans and recovers.

    A plain state machine: messages in by ``receive``, timers by ``step``, messages out by ``take_outbox``. Workers come
    and go by ``worker_joined`` and ``worker_lost``; one that is silent too long counts as lost until it is heard again.
    """

    def __init__(self, name: str, planner: Planner, times: Times) -> None:
        self.name = name
        self._planner = planner
        self._times = times
        self._sessions: LeasedRows[Session] = LeasedRows(times.tombstone_s)
        self._workers: dict[str, Worker] = {}
        self._outbox = Outbox()
        self._renewed_s = float("-inf")
        self.num_reopened = 0

    def take_outbox(self) -> dict[str, list[Message]]:
        """Messages since the last call, by worker and ingress."""
        return self._outbox.take()

    def reports(self) -> dict[str, tuple[WorkerKind, dict[str, float]]]:
        """The newest counters of every live worker, by its name."""
        return {name: (worker.kind, worker.report) for name, worker in self._workers.items() if not worker.is_silent}

    @property
    def num_sessions(self) -> int:
        """Sequences held."""
        return len(self._sessions)

    def worker_joined(self, name: str, kind: WorkerKind, now_s: float) -> None:
        """A worker can be reached; sessions without one of its kind are opened on it."""
        self._workers[name] = Worker(kind, now_s)
        for session in self._sessions:
            for link in session.links:
                if link.worker == name:  # it was reached again: what it held may be gone
                    self._open(session, link, now_s)
                elif link.worker is None and link.kind == kind:
                    self._place(session, link, now_s)

    def worker_lost(self, name: str, now_s: float) -> None:
        """A worker is gone: its sessions are opened elsewhere from the log, or wait for the next worker (rule 8)."""
        self._workers.pop(name, None)
        self._move_from(name, now_s)

    def receive(self, message: Message, now_s: float) -> None:
        """Take in one message."""
        match message:
            case Submit():
                self._on_submit(message, now_s)
            case Want():
                self._on_want(message, now_s)
            case Cancel(seq, attempt):
                self._end(self._sessions.drop(seq, Inc(attempt, 0), now_s))
            case Verdict():
                self._on_verdict(message, now_s)
            case Offer():
                self._on_offer(message)
            case Resync():
                self._on_resync(message, now_s)
            case Alive():
                self._on_alive(message, now_s)

    def step(self, now_s: float) -> bool:
        """Timers: leases, renewals, repeats, silence. Cheap; to be called a few times a second. Always False."""
        for session in self._sessions.expire(now_s):
            self._end(session)
        if now_s < self._renewed_s + self._times.renew_s:
            return False
        self._renewed_s = now_s
        for name, worker in self._workers.items():
            if not worker.is_silent and now_s - worker.heard_s > self._times.silence_s:
                worker.is_silent = True
                self._move_from(name, now_s)
        self._renew(now_s)
        return False

    def _renew(self, now_s: float) -> None:
        live: dict[str, list[tuple[str, Inc]]] = {name: [] for name in self._workers}
        for session in self._sessions:
            for link in session.links:
                if link.worker is not None and now_s - link.opened_s > self._times.settle_s:
                    live.setdefault(link.worker, []).append((session.seq, session.link_inc(link)))
            if len(session.links) > 1 and session.drafter.length < len(session.log):
                self._commit(session, session.drafter.length)
        for name, entries in live.items():
            self._outbox.put(name, Live(self.name, tuple(entries)))

    def _on_submit(self, message: Submit, now_s: float) -> None:
        plan = self._planner(message.spec) if message.spec.model == "target" else Plan()
        session = Session(message, plan, self._times.lease_s)
        held = self._sessions.get(message.seq)
        if self._sessions.admit(session, now_s) is None:
            return
        if held is not None:
            self._end(held)
        for link in session.links:
            self._place(session, link, now_s)

    def _on_want(self, message: Want, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        if session is None or session.inc.attempt < message.attempt:
            self._outbox.put(message.ingress, Gone(message.seq, message.attempt))
        elif session.inc.attempt == message.attempt:
            self._sessions.renew(session, now_s)
            if session.client_length < message.have <= len(session.log):
                session.client_length = message.have
                session.notes = session.notes.last(len(session.log) - message.have)
            self._tell(session)

    def _on_verdict(self, message: Verdict, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        if session is None or session.finish is not None or message.inc != session.link_inc(session.target):
            return
        before = len(session.log)
        if not self._takes(session, message):
            self._reopen(session, session.target, now_s)
            return
        session.notes = session.notes + message.notes.last(len(session.log) - before)
        self._send(session.target, Ack(message.seq, message.inc, len(session.log)))
        if message.finish is not None and message.mark.length == len(session.log):
            self._close_links(session)
            session.finish = message.finish
        elif len(session.links) > 1:
            self._commit(session, session.drafter.sent)
        self._tell(session)

    def _takes(self, session: Session, message: Verdict) -> bool:
        """Rule 2: append once, and check. False where another life of the target has decided under this inc."""
        extension = session.log.extend_to(message.base, message.tokens, message.mark)
        return extension in (Extension.EXTENDED, Extension.NOTHING_NEW)

    def _on_offer(self, message: Offer) -> None:
        session = self._sessions.get(message.seq)
        if session is None or session.finish is not None or message.inc != session.link_inc(session.drafter):
            return
        session.drafter.length = min(message.mark.length, len(session.log))
        self._send(session.target, replace(message, inc=session.link_inc(session.target)))

    def _on_resync(self, message: Resync, now_s: float) -> None:
        session = self._sessions.get(message.seq)
        if session is None:
            return
        for link in session.links:
            if link.worker == message.worker and message.inc == session.link_inc(link):
                self._reopen(session, link, now_s)

    def _on_alive(self, message: Alive, now_s: float) -> None:
        worker = self._workers.get(message.worker)
        if worker is None:
            return
        if worker.is_silent:
            self.worker_joined(message.worker, worker.kind, now_s)
        worker = self._workers[message.worker]
        worker.heard_s, worker.report = now_s, message.report

    def _move_from(self, name: str, now_s: float) -> None:
        for session in self._sessions:
            for link in session.links:
                if link.worker == name:
                    self._place(session, link, now_s)

    def _place(self, session: Session, link: WorkerLink, now_s: float) -> None:
        """Open a session on the least loaded worker of a kind, under a new n if it was open before."""
        was_open = link.worker is not None
        link.worker = None
        load = Counter(link.worker for other in self._sessions for link in other.links)
        candidates = [
            (load[name], name)
            for name, worker in self._workers.items()
            if worker.kind == link.kind and not worker.is_silent
        ]
        link.n += was_open
        self.num_reopened += was_open
        if candidates:
            link.worker = min(candidates)[1]
            self._open(session, link, now_s)

    def _reopen(self, session: Session, link: WorkerLink, now_s: float) -> None:
        self.num_reopened += 1
        link.n += 1
        self._open(session, link, now_s)

    def _open(self, session: Session, link: WorkerLink, now_s: float) -> None:
        link.opened_s = now_s
        link.length = link.sent = len(session.log)
        inc, tokens, lease_s = session.link_inc(link), session.log.tail(0), self._times.lease_s
        self._send(link, Open(session.seq, inc, self.name, tokens, session.spec, session.plan, lease_s))

    def _commit(self, session: Session, base: int) -> None:
        """Tell the drafter the log from ``base`` on: from what was sent last, and again now and then if it is lost."""
        link = session.drafter
        link.sent = len(session.log)
        self._send(link, Commit(session.seq, session.link_inc(link), base, session.log.tail(base), session.log.mark()))

    def _tell(self, session: Session) -> None:
        """Tokens to the ingress, from what it has acknowledged on; the end goes by itself, bound to a mark."""
        base, mark = session.client_length, session.log.mark()
        attempt, tokens = session.inc.attempt, session.log.tail(base)
        message = NewTokens(session.seq, attempt, base, tokens, session.notes, mark)
        self._outbox.put(session.ingress, message)
        if session.finish is not None:
            self._outbox.put(session.ingress, End(session.seq, attempt, mark, session.finish))

    def _end(self, session: Session | None) -> None:
        if session is not None:
            self._close_links(session)

    def _close_links(self, session: Session) -> None:
        for link in session.links:
            self._send(link, Close(session.seq, session.link_inc(link)))
            link.worker = None

    def _send(self, link: WorkerLink, message: Message) -> None:
        if link.worker is not None:
            self._outbox.put(link.worker, message)
