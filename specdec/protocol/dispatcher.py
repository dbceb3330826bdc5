"""Which worker has which sequence: opening, closing, handing over, and what follows a worker's death."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from specdec.core.messages import Close, Message, Open
from specdec.core.types import Fingerprints
from specdec.drafting.length.plans import WorkerKind
from specdec.protocol.labels import label, labels
from specdec.protocol.leases import Outbox
from specdec.protocol.probation import Probation
from specdec.protocol.sessions import RouterCounters, Session, WorkerLink
from specdec.protocol.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_KINDS: tuple[WorkerKind, ...] = ("target", "drafter")


class Dispatcher:
    """A router's links to its workers.

    Args:
        router: Its name.
        outbox: Where messages for workers are put.
        counters: Of the router.
        probation: Its suspects.
        lease_s: For which sequences are opened.
        fingerprints: Of the models that workers must have (rule 14).

    Attributes:
        workers: Those that can be reached.
        lease_s: As given; it may be changed.
    """

    def __init__(
        self,
        router: str,
        outbox: Outbox,
        counters: RouterCounters,
        probation: Probation,
        lease_s: float,
        fingerprints: Fingerprints,
    ) -> None:
        self._router = router
        self._outbox = outbox
        self._counters = counters
        self._probation = probation
        self.lease_s = lease_s
        self._fingerprints = fingerprints
        self.workers = WorkerPool(counters)

    def place(self, session: Session, link: WorkerLink, now_s: float) -> None:
        """Open a session on a worker of a kind, under a new n if it was open before.

        It goes where most of it is cached, if that worker is not too loaded, else to the least loaded.
        """
        self._counters.num_reopened += self.workers.detach(link)
        name = self.workers.choose(link.kind, session)
        if name is not None:
            self.workers.attach(link, name)
            self.open(session, link, now_s)

    def place_missing(self, session: Session, link: WorkerLink, now_s: float) -> None:
        """Open a session where it is not, unless it waits for its group's turn."""
        if link.worker is None and not _is_suspected(session, link):
            self.place(session, link, now_s)

    def reopen(self, session: Session, link: WorkerLink, why: str, now_s: float) -> None:
        """Open a session anew where it is."""
        logger.info("The sequence %s is opened again on %s: %s", label(session), link.worker, why)
        self._counters.num_reopened += 1
        link.n += 1
        link.is_replanned = False
        self.open(session, link, now_s)

    def refused(self, session: Session, link: WorkerLink, why: str, now_s: float) -> None:
        """A worker takes this session neither now nor later; one of a group goes elsewhere with its group."""
        logger.info("The sequence %s was refused by %s: %s", label(session), link.worker, why)
        group = session.suspects
        if group is None or not _is_suspected(session, link):
            self.place(session, link, now_s)
            return
        for member in group.members:
            self.workers.detach(member.target)
        self._probation.put_back(group)

    def open(self, session: Session, link: WorkerLink, now_s: float) -> None:
        """Tell a session's worker the whole of it."""
        link.opened_s = now_s
        link.length = link.sent = len(session.log)
        if session.span is not None:
            session.span.add(**{f"num_{link.kind}_openings": 1})
        fingerprints, is_deciding = self._fingerprints, link is session.target
        group = session.suspects if is_deciding else None
        message = Open(
            session.seq,
            session.link_inc(link),
            self._router,
            session.log.prompt,
            session.spec,
            session.plan,
            self.lease_s,
            fingerprint=fingerprints.deciding(session.spec.model) if is_deciding else fingerprints.vocabulary,
            suspects="" if group is None else group.name,
            output=session.log.tail(len(session.log.prompt)),
        )
        self.send(link, message)

    def close(self, session: Session, link: WorkerLink) -> None:
        """Close what is open on a link; the tombstone there keeps out what is not newer."""
        self.send(link, Close(session.seq, session.link_inc(link)))
        self.workers.detach(link)

    def close_all(self, session: Session) -> None:
        """Close what is open of a session."""
        session.end_span()
        self._probation.leave(session)
        has_output = len(session.log) > session.spec.output_start
        if has_output and session.finish != "error":
            self.workers.has_read(session)
        for link in session.links:
            self.close(session, link)

    def send(self, link: WorkerLink, message: Message) -> None:
        """Send a message to a link's worker, if there is one."""
        if link.worker is not None:
            self._outbox.put(link.worker, message)

    # Workers that die, and workers that drain.

    def lose(self, name: str, sessions: Iterable[Session], now_s: float, *, is_only_one: bool) -> list[Session]:
        """A worker is dead, or as good as that: what it decided is suspected, what it drafted is opened elsewhere.

        Args:
            name: Of the worker.
            sessions: Of the router.
            now_s: The time.
            is_only_one: Whether the worker had said that it holds no more than one sequence.

        Returns:
            Sessions that are at fault, and must end.
        """
        decided: list[Session] = []
        for session in sessions:
            for link in session.links:
                if link.worker == name and link is session.target:
                    decided.append(session)
                elif link.worker == name:
                    self.place(session, link, now_s)
        for session in decided:
            self.workers.detach(session.target)
        if decided:
            logger.warning("The worker %s is lost; to be opened elsewhere: %s", name, labels(decided))
        at_fault = self._probation.failed(name, decided, is_only_one=is_only_one)
        self._counters.num_suspects += len(decided) - len(at_fault)
        return at_fault

    def try_suspects(self, now_s: float) -> None:
        """Open a group of suspects on each worker that has none, the least loaded first."""
        for kind in _KINDS if self._probation.is_waiting else ():
            while (name := self.workers.least_loaded(kind, self._probation.taken)) is not None:
                group = self._probation.next_for(name, kind)
                if group is None:
                    break
                self._counters.num_reopened += len(group.members)
                for session in group.members:
                    self.workers.attach(session.target, name)
                    self.open(session, session.target, now_s)

    def hand_over(self, sessions: Iterable[Session], now_s: float) -> None:
        """Take from workers that drain what another of their kind can go on with; suspects first take their step."""
        draining = {
            name
            for name, worker in self.workers
            if worker.is_draining and worker.num_links and self.workers.least_loaded(worker.kind) is not None
        }
        for session in sessions if draining else ():
            for link in session.links:
                if link.worker in draining and not _is_suspected(session, link):
                    self._counters.num_handed_over += 1
                    self.close(session, link)
                    self.place(session, link, now_s)


def _is_suspected(session: Session, link: WorkerLink) -> bool:
    """Whether a link waits for its group's turn, or is on probation with it."""
    return link is session.target and session.suspects is not None
