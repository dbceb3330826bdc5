"""The router's state machine: the log of record, and the relay between the workers. It never decides a token."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from specdec.protocol.leases import LeasedRows, Outbox, Times
from specdec.protocol.marks import Extension
from specdec.protocol.messages import (
    Ack,
    Alive,
    Cancel,
    Close,
    Commit,
    End,
    Gone,
    Inc,
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
from specdec.protocol.planning import Planning
from specdec.protocol.plans import FixedPlans, PlanController, Planner, WorkerKind
from specdec.protocol.sessions import Session, Worker, WorkerLink


class RouterMachine:
    """Holds the log of record per sequence, places, relays, plans and recovers.

    A plain state machine: messages in by ``receive``, timers by ``step``, messages out by ``take_outbox``. Workers come
    and go by ``worker_joined`` and ``worker_lost``; one that is silent too long counts as lost until it is heard again.

    Args:
        name: By which its peers know it.
        planner: Gives each sequence its plan, once; or a controller, which may change it.
        times: The protocol's clock.
    """

    def __init__(self, name: str, planner: Planner | PlanController, times: Times) -> None:
        self.name = name
        self._controller: PlanController = FixedPlans(planner) if callable(planner) else planner
        self._planning = Planning(self._controller)
        self._times = times
        self._sessions: LeasedRows[Session] = LeasedRows(times.tombstone_s)
        self._workers: dict[str, Worker] = {}
        self._outbox = Outbox()
        self._renewed_s = float("-inf")
        self.num_reopened = 0

    def set_times(self, times: Times) -> None:
        """Go by other times from now on."""
        self._times = times

    def set_planner(self, planner: Planner | PlanController, now_s: float) -> None:
        """Plan by another planner from now on, also for the sequences that are open."""
        self._controller = FixedPlans(planner) if callable(planner) else planner
        self._planning = Planning(self._controller)
        for session in self._sessions:
            if session.is_planned:
                self._replan(session, self._controller.opened(session.seq, session.spec), now_s)

    def take_outbox(self) -> dict[str, list[Message]]:
        """Messages since the last call, by worker and ingress."""
        return self._outbox.take()

    def reports(self) -> dict[str, tuple[WorkerKind, dict[str, float]]]:
        """The newest counters of every live worker, by its name."""
        return {name: (worker.kind, worker.report) for name, worker in self._workers.items() if not worker.is_silent}

    def figures(self) -> dict[str, dict[str, float]]:
        """The controller's choices and estimates; see :meth:`specdec.protocol.plans.PlanController.figures`."""
        return self._controller.figures()

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
        self._controller.lost(name)
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
        """Timers: leases, renewals, repeats, silence, reviews. To be called in each turn of its driver; False."""
        for session in self._sessions.expire(now_s):
            self._end(session)
        if self._planning.take_turn(now_s):
            self._review(now_s)
        if now_s < self._renewed_s + self._times.renew_s:
            return False
        self._renewed_s = now_s
        for name, worker in self._workers.items():
            if not worker.is_silent and now_s - worker.heard_s > self._times.silence_s:
                worker.is_silent = True
                self._controller.lost(name)
                self._move_from(name, now_s)
        self._renew(now_s)
        return False

    def _review(self, now_s: float) -> None:
        """Ask the controller, and carry out what it has changed."""
        sessions = [session for session in self._sessions if session.is_planned and session.target.worker is not None]
        placements = {session.seq: (str(session.target.worker), session.drafter.worker) for session in sessions}
        for seq, plan in self._controller.review(placements, now_s).items():
            session = self._sessions.get(seq)
            if session is not None and session.is_planned:
                self._replan(session, plan, now_s)

    def _replan(self, session: Session, plan: Plan, now_s: float) -> None:
        """A plan that rises from nothing opens the sequence on a drafter, and one that falls to nothing closes it."""
        link = session.drafter
        if not plan.num_draft_tokens and link.worker is not None:
            self._send(link, Close(session.seq, session.link_inc(link)))
            link.worker = None
            link.n += 1  # the tombstone there keeps out what is not newer
        session.plan = plan
        for link in session.links:
            if link.kind == "drafter" and link.worker is None:
                self._place(session, link, now_s)
            else:
                self._send_plan(session, link)

    def _send_plan(self, session: Session, link: WorkerLink) -> None:
        link.is_replanned = True
        self._send(link, PlanUpdate(session.seq, session.link_inc(link), session.plan))

    def _renew(self, now_s: float) -> None:
        live: dict[str, list[tuple[str, Inc]]] = {name: [] for name in self._workers}
        for session in self._sessions:
            for link in session.links:
                if link.worker is not None and now_s - link.opened_s > self._times.settle_s:
                    live.setdefault(link.worker, []).append((session.seq, session.link_inc(link)))
                    if link.is_replanned:  # nobody acknowledges a plan: it is repeated as long as it holds
                        self._send_plan(session, link)
            if len(session.links) > 1 and session.drafter.length < len(session.log):
                self._commit(session, session.drafter.length)
        for name, entries in live.items():
            self._outbox.put(name, Live(self.name, tuple(entries)))
            if name in self._workers and self._workers[name].asked_s is None:
                self._workers[name].asked_s = now_s

    def _on_submit(self, message: Submit, now_s: float) -> None:
        session = Session(message, Plan(), self._times.lease_s)
        held = self._sessions.get(message.seq)
        if self._sessions.admit(session, now_s) is None:
            return
        if held is not None:
            self._end(held)
        if session.is_planned:
            session.plan = self._planning.opened(message.seq, message.spec)
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
        new = message.notes.last(len(session.log) - before)
        session.notes = session.notes + new
        self._planning.decided(session.seq, new, now_s)
        is_over = message.finish is not None and message.mark.length == len(session.log)
        if not is_over and len(session.links) > 1:
            self._commit(session, session.drafter.sent)  # first: what is late here makes the next drafts late
        self._send(session.target, Ack(message.seq, message.inc, len(session.log)))
        if is_over:
            self._close_links(session)
            session.finish, session.reason = message.finish, message.reason
            self._planning.closed(session.seq)
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
        inc = session.link_inc(session.target)
        self._send(session.target, message if message.inc == inc else replace(message, inc=inc))

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
        self._controller.reported(message.worker, worker.kind, message.report)
        if worker.asked_s is not None:
            self._controller.echoed(message.worker, now_s - worker.asked_s)
            worker.asked_s = None

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
        link.is_replanned = False
        self.num_reopened += was_open
        if candidates:
            link.worker = min(candidates)[1]
            self._open(session, link, now_s)

    def _reopen(self, session: Session, link: WorkerLink, now_s: float) -> None:
        self.num_reopened += 1
        link.n += 1
        link.is_replanned = False
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
        message = NewTokens(session.seq, attempt, base, tokens, session.notes, mark, session.plan)
        self._outbox.put(session.ingress, message)
        if session.finish is not None:
            self._outbox.put(session.ingress, End(session.seq, attempt, mark, session.finish, session.reason))

    def _end(self, session: Session | None) -> None:
        if session is not None:
            self._close_links(session)
            self._planning.closed(session.seq)

    def _close_links(self, session: Session) -> None:
        for link in session.links:
            self._send(link, Close(session.seq, session.link_inc(link)))
            link.worker = None

    def _send(self, link: WorkerLink, message: Message) -> None:
        if link.worker is not None:
            self._outbox.put(link.worker, message)
