"""What happened when: steps and messages of one worker, kept in a bounded ring while somebody wants to see them.

Times are of ``time.monotonic_ns``, which on Linux is the same clock in all processes of one machine. Between machines
only the wall clocks can be compared, as well as they are kept in step: see :class:`ClockReading`.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from specdec.engine.observed import DraftRecord, StepRecord, VerifyRecord
from specdec.protocol.backends import Status
from specdec.protocol.drafts import DraftSource
from specdec.protocol.messages import Ack, Close, Commit, Message, Offer, Open, Plan, PlanUpdate, Verdict

CAPACITY = 20_000
"""Entries that are kept: messages, and rows of steps. Some ten megabytes at most."""

MachineKind = Literal["target", "drafter", "router"]
What = Literal["sent", "arrived", "received"]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MessageEvent(NamedTuple):
    """A message at one end of its way.

    Attributes:
        what: ``sent`` by the machine, ``arrived`` in the other process, ``received`` by the machine there.
        at_ns: When.
        peer: To whom it was sent; empty at the other end.
        kind: Name of the message's class.
        inc: Attempt and number of the sequence's incarnation.
        length: Length of the log that it speaks of, its own tokens left out where they are not committed.
        num_tokens: Tokens it carries; of an offer, those of its chain.
        num_branches: Branches of an offer.
    """

    what: What
    at_ns: int
    peer: str
    kind: str
    seq: str
    inc: tuple[int, int]
    length: int
    num_tokens: int
    num_branches: int


class VerifiedRow(NamedTuple):
    """A row of a target's step.

    Attributes:
        round: Number of the sequence's round, the first being 1; of a row that reads its prompt, the one to come.
        base: Length of the log before it.
        num_drafted: Draft tokens verified.
        num_accepted: How many of them were kept.
        num_decided: Tokens decided, 0 while the prompt is read.
        way: How the sequence is drafted: ``off``, ``in_turn``, ``overlap`` or ``outcomes``.
        source: What of an offer the draft was: ``chain`` or ``branch``; empty where there was none.
    """

    seq: str
    round: int
    base: int
    num_drafted: int
    num_accepted: int
    num_decided: int
    way: str
    source: DraftSource = ""


class DraftedRows(NamedTuple):
    """A sequence's rows of a drafter's step.

    Attributes:
        base: Length of the log that the drafter knows.
        num_ahead: Draft tokens after the log, with the one that this step proposes; 0 where only branches go on.
        num_branches: Branches that get a token.
        way: As for :class:`VerifiedRow`.
    """

    seq: str
    base: int
    num_ahead: int
    num_branches: int
    way: str


class TargetStep(NamedTuple):
    """A step of a target, from the call of the model to its answer."""

    start_ns: int
    end_ns: int
    rows: tuple[VerifiedRow, ...]


class DraftStep(NamedTuple):
    """A step of a drafter."""

    start_ns: int
    end_ns: int
    rows: tuple[DraftedRows, ...]


class Turn(NamedTuple):
    """A machine's turn around a step: what it took to choose the rows and to carry out what the model said."""

    start_ns: int
    end_ns: int


class ClockReading(NamedTuple):
    """Both clocks of a machine at one moment.

    Attributes:
        boot_id: Of the machine's running kernel: processes with the same one share the monotonic clock.
        monotonic_ns: Which all times of a trace are of.
        wall_ns: Nanoseconds since the epoch; joins traces of several machines.
    """

    boot_id: str
    monotonic_ns: int
    wall_ns: int


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """All that a recorder holds, in order of time within each field.

    Attributes:
        name: The worker's.
        num_dropped: Entries that had to make room for newer ones since the worker started.
    """

    name: str
    role: MachineKind
    clock: ClockReading
    num_dropped: int
    messages: tuple[MessageEvent, ...] = ()
    target_steps: tuple[TargetStep, ...] = ()
    draft_steps: tuple[DraftStep, ...] = ()
    turns: tuple[Turn, ...] = ()


_Entry = MessageEvent | TargetStep | DraftStep | Turn


class Recorder:
    """A ring of what one worker did; the newest is kept.

    Its methods may be called from several threads. Nothing is formatted, and nothing looked up, before ``trace``.

    Args:
        name: The worker's.
        role: What it is.
        capacity: Entries kept: messages, turns, and rows of steps.
        clock_ns: Nanoseconds, of a clock that never goes back.
    """

    def __init__(
        self, name: str, role: MachineKind, capacity: int = CAPACITY, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name = name
        self.role: MachineKind = role
        self.clock_ns = clock_ns
        self._capacity = capacity
        self._entries: deque[tuple[int, _Entry]] = deque()
        self._num_held = 0
        self._num_dropped = 0
        self._plans: dict[str, Plan] = {}
        self._rounds: dict[str, int] = {}
        self._lock = threading.Lock()

    def sent(self, peer: str, messages: Iterable[Message]) -> None:
        """The machine has sent messages to a peer."""
        now_ns = self.clock_ns()
        for message in messages:
            self._note_message("sent", now_ns, peer, message)

    def arrived(self, messages: Iterable[Message]) -> None:
        """Messages have come into this process; the machine may still be busy."""
        now_ns = self.clock_ns()
        for message in messages:
            self._note_message("arrived", now_ns, "", message)

    def received(self, message: Message) -> None:
        """The machine has taken in a message."""
        now_ns = self.clock_ns()
        self._note_message("received", now_ns, "", message)
        match message:
            case Open(seq=seq, plan=plan) | PlanUpdate(seq=seq, plan=plan):
                self._plans[seq] = plan
            case Close(seq=seq):
                self._plans.pop(seq, None)
                self._rounds.pop(seq, None)

    def turned(self, start_ns: int) -> None:
        """A turn of the machine with a step in it has ended."""
        self._keep(Turn(start_ns, self.clock_ns()))

    def stepped(self, step: StepRecord) -> None:
        """A step of the worker's backend has ended; a listener of :mod:`specdec.engine.observed`."""
        if isinstance(step, VerifyRecord):
            rows = self._verified(step)
            self._keep(TargetStep(step.start_ns, step.end_ns, rows), len(rows))
        elif isinstance(step, DraftRecord):
            drafted = self._drafted(step)
            self._keep(DraftStep(step.start_ns, step.end_ns, drafted), len(drafted))

    def _verified(self, step: VerifyRecord) -> tuple[VerifiedRow, ...]:
        rows = []
        for job, result in zip(step.jobs, step.results, strict=True):
            if result.status is Status.WAITING:
                continue
            number = self._rounds.get(job.key, 0) + 1
            if result.status is Status.DECIDED:
                self._rounds[job.key] = number
            counts = result.num_drafted, result.num_accepted, len(result.run)
            source = job.source if result.num_drafted else ""
            rows.append(VerifiedRow(job.key, number, len(job.log), *counts, self._mode(job.key), source))
        return tuple(rows)

    def _drafted(self, step: DraftRecord) -> tuple[DraftedRows, ...]:
        found: dict[str, list[int]] = {}  # length of the log, tokens ahead, branches
        for job, proposal in zip(step.jobs, step.results, strict=True):
            if proposal.status is Status.WAITING:
                continue
            counts = found.setdefault(job.fork_of or job.key, [job.num_committed, 0, 0])
            if job.fork_of is not None:
                counts[2] += 1
            else:
                counts[1] = len(job.tokens) - job.num_committed + (proposal.token is not None) + len(proposal.further)
        rows = found.items()
        return tuple(DraftedRows(seq, base, ahead, branches, self._mode(seq)) for seq, (base, ahead, branches) in rows)

    def trace(self) -> WorkerTrace:
        """All that is held now."""
        with self._lock:
            entries, num_dropped = [entry for _, entry in self._entries], self._num_dropped
        messages = sorted((e for e in entries if isinstance(e, MessageEvent)), key=lambda event: event.at_ns)
        return WorkerTrace(
            self.name,
            self.role,
            read_clock(self.clock_ns),
            num_dropped,
            tuple(messages),
            tuple(entry for entry in entries if isinstance(entry, TargetStep)),
            tuple(entry for entry in entries if isinstance(entry, DraftStep)),
            tuple(entry for entry in entries if isinstance(entry, Turn)),
        )

    def _mode(self, seq: str) -> str:
        plan = self._plans.get(seq)
        return "off" if plan is None else plan.way

    def _note_message(self, what: What, now_ns: int, peer: str, message: Message) -> None:
        """Keep a message, if it is of those that a timeline shows."""
        match message:
            case Offer(seq, inc, mark, chain, branches):
                figures = mark.length, len(chain), len(branches)
            case Verdict(seq, inc, mark=mark, tokens=tokens) | Commit(seq, inc, mark=mark, tokens=tokens):
                figures = mark.length, len(tokens), 0
            case Ack(seq, inc, length):
                figures = length, 0, 0
            case Open(seq, inc, prompt=prompt, output=output):
                figures = len(prompt) + len(output), len(prompt) + len(output), 0
            case PlanUpdate(seq, inc, plan):
                figures = 0, plan.num_draft_tokens, plan.num_branches
            case Close(seq, inc):
                figures = 0, 0, 0
            case _:
                return
        self._keep(MessageEvent(what, now_ns, peer, type(message).__name__, seq, inc, *figures))

    def _keep(self, entry: _Entry, size: int = 1) -> None:
        with self._lock:
            self._entries.append((size, entry))
            self._num_held += size
            while self._num_held > self._capacity:
                self._num_held -= self._entries.popleft()[0]
                self._num_dropped += 1


def read_clock(clock_ns: Callable[[], int] = time.monotonic_ns) -> ClockReading:
    """This machine's clocks, now."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux; processes of one machine then share no more than its name
        boot_id = platform.node()
    return ClockReading(boot_id, clock_ns(), time.time_ns())
