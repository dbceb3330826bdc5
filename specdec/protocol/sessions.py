"""What a router holds: sequences with their links, and workers.

Rule 16 at the router: who was open on a target that died is opened again apart from others, one group at a time.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdec.core.log import TokenLog
from specdec.core.messages import DRAFTER, Epoch, Notes, Plan, Submit
from specdec.core.types import Finish
from specdec.drafting.plans import WorkerKind
from specdec.protocol.leases import LeasedSequence, Span, Tracer, label
from specdec.protocol.worker import FORGIVEN_TOKENS, MOST_ALONE_FAILURES, apart


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

    def may_be_on(self, worker: str) -> bool:
        """Whether no member is known to be refused there."""
        return not any(worker in session.refused_by for session in self.members)


class Quarantine:
    """The suspects of a router.

    A group fails if its worker dies before each of its members has had a token. Other routers may have sequences there,
    so that who was alone in its group is at fault only if the worker had said that its step is next. Twice in a row,
    and the sequence ends. That word may be lost with the worker, so a sequence ends, too, when its worker has died more
    than ``max_reopens`` times with it alone in quarantine, or as its only sequence. Shared deaths do not count.

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
    def taken(self) -> frozenset[str]:
        """Workers on which a group is open."""
        return frozenset(self._open)

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
        kinds = {session.target.kind for session in sessions}
        for kind in sorted(kinds, key=lambda kind: (kind != "target", kind)):
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
        group = next((group for group in self._waiting if group.kind == kind and group.may_be_on(worker)), None)
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


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WorkerLink:
    """A session's link to one worker.

    Attributes:
        worker: Its name; None while none is to be had.
        n: Raised whenever the sequence is opened anew on this link.
        length: Length of the log that the worker is known to have.
        sent: Length up to which it was sent.
        is_replanned: Whether the plan was changed since the worker was given one under this ``n``.
        num_mismatches: Times in a row that the worker had another history than the session, and got nowhere between.
    """

    kind: WorkerKind
    worker: str | None = None
    n: int = 0
    opened_s: float = 0.0
    length: int = 0
    sent: int = 0
    is_replanned: bool = False
    num_mismatches: int = 0


class Session(LeasedSequence):
    """A sequence's log of record. Its epoch is (attempt, 0); each of its links has an ``n`` of its own.

    Attributes:
        drafter: Its link to whoever drafts for it.
        may_draft: Whether drafters may be asked: not after one had another history of it too often.
        client_length: Length that the ingress has acknowledged.
        sent_length: Length up to which it was sent.
        prompt_sent_s: When the ingress was last sent what it has not acknowledged of the prompt's log probabilities.
        reason: What went wrong, where it has finished with an error.
        suspects: The group that it is in quarantine with; None while it is not suspected.
        is_tried: Whether the worker has said that its group is about to take its step.
        num_failures: Times in a row that its worker died as it was tried alone.
        num_deaths: Times that its worker died with it alone in quarantine, tried or not, or as its only sequence.
        failed_length: Length of the log at the newest of these.
        numeric: As in :class:`specdec.core.messages.Submit`.
        opened: Length of the log with which it was submitted.
        refused_by: Targets whose logits have another hash.
        span: Of it here, from its coming until nothing is open of it; None where its request is not traced.
    """

    __slots__ = (
        *("client_length", "drafter", "failed_length", "finish", "ingress", "is_tried", "log", "may_draft", "notes"),
        *(
            "num_deaths",
            "num_failures",
            "numeric",
            "opened",
            "plan",
            "reason",
            "refused_by",
            "span",
            "spec",
            "prompt_sent_s",
            "suspects",
            "target",
            "sent_length",
        ),
    )

    def __init__(self, message: Submit, plan: Plan, lease_s: float) -> None:
        super().__init__(seq=message.seq, epoch=Epoch(message.attempt, 0), lease_s=lease_s)
        self.ingress = message.ingress
        self.spec = message.spec
        self.plan = plan
        self.log = TokenLog(message.prompt, message.output)
        self.client_length = self.sent_length = self.failed_length = self.opened = len(self.log)
        self.notes = Notes()
        self.prompt_sent_s = 0.0
        self.finish: Finish | None = None
        self.reason = ""
        self.suspects: SuspectGroup | None = None
        self.is_tried = False
        self.num_failures = self.num_deaths = 0
        self.target = WorkerLink("target")
        self.drafter = WorkerLink(DRAFTER)
        self.may_draft = True
        self.numeric = message.numeric
        self.refused_by: set[str] = set()
        self.span: Span | None = None

    def begin_span(self, tracer: Tracer | None) -> None:
        """It was taken in; what its workers do for it is below its span."""
        if tracer is not None and self.spec.trace:
            self.span = tracer(self.spec.trace, self.seq)
            self.spec = replace(self.spec, trace=self.span.label)

    def end_span(self) -> None:
        """Nothing of it is open any more."""
        if self.span is not None:
            self.span.end()
            self.span = None

    def end(self, finish: Finish, reason: str) -> None:
        """It has finished."""
        self.finish, self.reason = finish, reason
        if finish == "error":
            logger.warning("The sequence %s ends with an error: %s", label(self), reason)

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """The links that this session needs: none once it is finished, no drafter if nothing is drafted."""
        if self.finish is not None:
            return ()
        return (self.target, self.drafter) if self.plan.num_draft_tokens and self.may_draft else (self.target,)

    @property
    def lacks_drafter(self) -> bool:
        """Whether it needs a drafter, and has none."""
        return any(link.kind == DRAFTER and link.worker is None for link in self.links)

    @property
    def is_planned(self) -> bool:
        """Whether anything may be drafted for it."""
        return self.finish is None

    def link_epoch(self, link: WorkerLink) -> Epoch:
        """The epoch under which the sequence is open on a link."""
        return Epoch(self.epoch.attempt, link.n)


@dataclass(slots=True)
class RouterCounters:
    """What a router has done since it started.

    Attributes:
        num_reopened: Times that a sequence was opened again on a worker, for whatever reason.
        num_resyncs: Requests of workers to open a sequence again, by their reason.
        num_worker_deaths: Workers whose links ended though they did not drain, by kind.
        num_suspects: Sequences that were on a target that died, and were opened again apart from others.
        num_sequence_errors: Sequences that ended with an error, decided by a target or here.
        num_refused_model: Sequences that were refused because they are of another model.
        num_refused_draining: Sequences that were refused because this router drains.
        num_handed_over: Sequences that were taken from a worker that drains.
        num_dropped_messages: Verdicts and offers of an incarnation that is over.
        num_placements: Choices of a target among several, by whether the one chosen was known to have any of the
            sequence cached: ``some`` or ``none``.
        num_reusable_prompt_tokens: Tokens that, at these choices, some target was known to have.
        num_reused_prompt_tokens: Of these, tokens that the one chosen had.
    """

    num_reopened: int = 0
    num_suspects: int = 0
    num_sequence_errors: int = 0
    num_refused_model: int = 0
    num_refused_draining: int = 0
    num_handed_over: int = 0
    num_dropped_messages: int = 0
    num_reusable_prompt_tokens: int = 0
    num_reused_prompt_tokens: int = 0
    num_placements: Counter[str] = field(default_factory=lambda: Counter(some=0, none=0))
    num_resyncs: Counter[str] = field(default_factory=Counter)
    num_worker_deaths: Counter[str] = field(default_factory=Counter)

    def metrics(self) -> dict[str, float]:
        """The counters by name; those by reason or kind are named ``num_resyncs/<reason>``, and so on."""
        metrics: dict[str, float] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Counter):
                metrics |= {f"{name}/{part}": float(count) for part, count in value.items()}
            else:
                metrics[name] = float(value)
        return metrics
