"""What a router holds: sequences with their links, and workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.protocol.leases import Row
from specdec.protocol.marks import TokenLog
from specdec.protocol.messages import Inc, Notes, Plan, Submit
from specdec.protocol.plans import WorkerKind
from specdec.types import Finish


@dataclass(slots=True)
class WorkerLink:
    """A session's link to one worker.

    Attributes:
        worker: Its name; None while none is to be had.
        n: Raised whenever the sequence is opened anew on this link.
        length: Length of the log that the worker is known to have.
        sent: Length up to which it was sent.
        is_replanned: Whether the plan was changed since the worker was given one under this ``n``.
    """

    kind: WorkerKind
    worker: str | None = None
    n: int = 0
    opened_s: float = 0.0
    length: int = 0
    sent: int = 0
    is_replanned: bool = False


class Session(Row):
    """A sequence's log of record. Its inc is (attempt, 0); each of its links has an ``n`` of its own."""

    __slots__ = ("client_length", "drafter", "finish", "ingress", "log", "notes", "plan", "reason", "spec", "target")

    def __init__(self, message: Submit, plan: Plan, lease_s: float) -> None:
        super().__init__(seq=message.seq, inc=Inc(message.attempt, 0), lease_s=lease_s)
        self.ingress = message.ingress
        self.spec = message.spec
        self.plan = plan
        self.log = TokenLog(message.tokens)
        self.client_length = len(self.log)
        self.notes = Notes()
        self.finish: Finish | None = None
        self.reason = ""
        self.target = WorkerLink("target" if message.spec.model == "target" else "drafter")
        self.drafter = WorkerLink("drafter")

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """The links that this session needs: none once it is finished, no drafter where nothing is drafted."""
        if self.finish is not None:
            return ()
        return (self.target, self.drafter) if self.plan.num_draft_tokens else (self.target,)

    @property
    def is_planned(self) -> bool:
        """Whether anything may be drafted for it."""
        return self.finish is None and self.spec.model == "target"

    def link_inc(self, link: WorkerLink) -> Inc:
        """The inc under which the sequence is open on a link."""
        return Inc(self.inc.attempt, link.n)


@dataclass(slots=True)
class Worker:
    """A worker as this router knows it.

    Attributes:
        report: Its newest counters.
        is_silent: Nothing was heard for too long; it gets no sequence until it is heard again.
        asked_s: When it was sent a renewal that it has not answered yet.
    """

    kind: WorkerKind
    heard_s: float
    report: dict[str, float] = field(default_factory=dict)
    is_silent: bool = False
    asked_s: float | None = None
