"""Rule 16 at the router: who was open on a target that died is opened again apart from others, one group at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

from specdec.drafting.length.plans import WorkerKind
from specdec.protocol.sessions import Session
from specdec.protocol.suspects import FORGIVEN_TOKENS, MOST_ALONE_FAILURES, apart


@dataclass(slots=True, eq=False)
class SuspectGroup:
    """Sequences that are opened together, and with nobody else in their first step.

    Attributes:
        name: Unique among all routers.
        kind: Of the worker that they need.
        members: Those that have not passed yet.
        worker: Where they are open; None while they wait for their turn.
    """

    name: str
    kind: WorkerKind
    members: list[Session]
    worker: str | None = None


class Probation:
    """The suspects of a router.

    A group fails if its worker dies before each of its members has had a token. Other routers may have sequences there,
    so that who was alone in its group is at fault only if the worker had said that its step is next. Twice in a row,
    and the sequence ends. That word may be lost with the worker, so a sequence ends, too, when its worker has died more
    than ``max_reopens`` times with it alone on probation, or as its only sequence. Shared deaths do not count.

    Args:
        router: Name of the router.
        max_reopens: Most times that a sequence is opened again after failures of its own; may change.
    """

    def __init__(self, router: str, max_reopens: int) -> None:
        self._router = router
        self.max_reopens = max_reopens
        self._waiting: deque[SuspectGroup] = deque()
        self._open: dict[str, SuspectGroup] = {}
        self._count = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a group waits for its turn."""
        return bool(self._waiting)

    @property
    def taken(self) -> Container[str]:
        """Workers on which a group is open."""
        return self._open

    def failed(self, worker: str, sessions: Sequence[Session], *, is_only_one: bool) -> list[Session]:
        """A worker has died, with these open.

        Args:
            worker: Its name.
            sessions: Those whose tokens it decided.
            is_only_one: Whether it had said that it holds no more than one.

        Returns:
            Those that are at fault, and must end; all others wait for their turn.
        """
        group = self._open.get(worker)
        tried = [] if group is None else list(group.members)
        rest = [session for session in sessions if session.suspects is None]
        alone = tried if len(tried) == 1 else rest if is_only_one and not tried and len(rest) == 1 else []
        at_fault = [session for session in alone if self._is_at_fault(session)]
        for session in tried:
            self.leave(session)
        for members in (tried, rest):
            self._divide([session for session in members if session not in at_fault])
        return at_fault

    def _is_at_fault(self, session: Session) -> bool:
        if len(session.log) - session.failed_length >= FORGIVEN_TOKENS:
            session.num_failures = session.num_deaths = 0
        session.num_failures += session.is_tried
        session.num_deaths += 1
        session.failed_length = len(session.log)
        return session.num_failures >= MOST_ALONE_FAILURES or session.num_deaths > self.max_reopens

    def _divide(self, sessions: Sequence[Session]) -> None:
        for kind in ("target", "drafter"):
            for members in apart([session for session in sessions if session.target.kind == kind]):
                self._count += 1
                group = SuspectGroup(f"{self._router}/{self._count}", kind, members)
                for session in members:
                    session.suspects = group
                self._waiting.append(group)

    def next_for(self, worker: str, kind: WorkerKind) -> SuspectGroup | None:
        """The group whose turn it is on a worker; it counts as open there from now on."""
        if worker in self._open:
            return None
        group = next((group for group in self._waiting if group.kind == kind), None)
        if group is not None:
            self._waiting.remove(group)
            self._open[worker] = group
            group.worker = worker
        return group

    def put_back(self, group: SuspectGroup) -> None:
        """A worker has refused a group: it is the next one of another worker."""
        if group.worker is not None:
            del self._open[group.worker]
            group.worker = None
            for session in group.members:
                session.is_tried = False
            self._waiting.appendleft(group)

    def leave(self, session: Session) -> None:
        """A session has passed, or is gone."""
        group, session.suspects, session.is_tried = session.suspects, None, False
        if group is None:
            return
        group.members.remove(session)
        if group.members:
            return
        if group.worker is None:
            self._waiting.remove(group)
        else:
            del self._open[group.worker]
