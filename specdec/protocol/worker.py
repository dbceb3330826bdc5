"""What a target and a drafter have in common: sequences under leases, opened, renewed and closed by routers.

Rule 16: whoever was in a step that failed is apart from others until it has taken a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from specdec.core.log import TokenLog
from specdec.core.messages import Alive, Close, Epoch, Interval, Live, Message, Open, Plan, PlanUpdate, Resync
from specdec.core.params import SequenceSpec
from specdec.protocol.leases import LeasedSequence, LeasedSequences, Outbox, Span, Times, Tracer

BackendMetrics = Callable[[], dict[str, float]]
"""Gives what a worker's backend holds now, by name."""
LastInterval = Callable[[], Interval]
"""Gives when the backend's newest step ran."""
MOST_INTERVALS = 64
"""Steps of a sequence whose times wait to be reported; the oldest are forgotten."""


class WorkerSequence(LeasedSequence):
    """A sequence on a worker.

    Attributes:
        suspects: Name of the group that it shares steps with while it is under suspicion; else empty (rule 16).
        suspected: The groups with the least are tried first.
        num_failures: Steps that it was alone in, and that failed.
        failed_length: Length of the log at the newest of these.
        span: Of it here; None where its request is not traced.
    """

    __slots__ = ("failed_length", "log", "num_failures", "plan", "router", "span", "spec", "suspected", "suspects")

    def __init__(self, message: Open) -> None:
        super().__init__(seq=message.seq, epoch=message.epoch, lease_s=message.lease_s)
        self.log = TokenLog(message.prompt, message.output)
        self.plan: Plan = message.plan
        self.router: str = message.router
        self.spec: SequenceSpec = message.spec
        self.suspects = ""
        self.suspected = 0
        self.num_failures = self.failed_length = 0
        self.span: Span | None = None

    def end_span(self) -> None:
        """It is held no more."""
        if self.span is not None:
            self.span.end()


R = TypeVar("R", bound=WorkerSequence)


class WorkerMachine(Generic[R]):
    """A worker as a plain state machine: messages in by ``receive``, work by ``step``, messages out by ``take_outbox``.

    It reads no clock and owns no thread: whoever drives it gives the time.

    Attributes:
        fingerprint: Of what sequences need here: of all that decides tokens for a target, of the vocabulary for a
            drafter. It refuses sequences that name another (rule 14); empty takes all.
        numeric: Hash of its logits (rule 17), empty if it is not strict. It refuses sequences that began with another.
        is_draining: Whether it refuses all new ones (rule 15).
        tracer: Begins spans of sequences whose request is traced; None where nobody traces.
    """

    def __init__(
        self,
        name: str,
        times: Times,
        backend_metrics: BackendMetrics | None = None,
        *,
        fingerprint: str = "",
        numeric: str = "",
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.numeric = numeric
        self.is_draining = False
        self.tracer: Tracer | None = None
        self._num_refused = {"model": 0, "numeric": 0, "draining": 0}
        self._backend_metrics = backend_metrics
        self._times = times
        self._sequences: LeasedSequences[R] = LeasedSequences(times.tombstone_s)
        self._outbox = Outbox()
        self._routers: set[str] = set()

    def set_times(self, times: Times) -> None:
        """Go by other times from now on."""
        self._times = times

    def drain(self, now_s: float) -> None:
        """Take no sequences any more, and say so; those that are here go on, or are opened elsewhere (rule 15)."""
        self.is_draining = True
        for router in self._routers | {sequence.router for sequence in self._sequences}:
            self._tell_alive(router)

    @property
    def is_drained(self) -> bool:
        """Whether it drains, and holds no sequence."""
        return self.is_draining and not len(self._sequences)

    def take_outbox(self) -> dict[str, list[Message]]:
        """Messages since the last call, by router."""
        return self._outbox.take()

    def receive(self, message: Message, now_s: float) -> None:
        """Take in one message; nothing is forwarded through a model here."""
        match message:
            case Open():
                self._on_open(message, now_s)
            case Close():
                self._drop(self._sequences.drop(message.seq, message.epoch, now_s))
            case Live():
                self._on_live(message, now_s)
            case PlanUpdate():
                sequence = self._sequences.current(message.seq, message.epoch)
                if sequence is not None:
                    sequence.plan = message.plan
            case _:
                self._on_other(message, now_s)

    def unsendable(self, message: Message, reason: str, now_s: float) -> None:
        """A message is too long to be sent; most may be lost."""

    def metrics(self) -> dict[str, float]:
        """The worker's cumulative counters and present gauges, by name."""
        metrics = {"num_sequences": float(len(self._sequences)), "is_draining": float(self.is_draining)}
        metrics.update({f"num_refused/{why}": float(count) for why, count in self._num_refused.items()})
        if self._backend_metrics is not None:
            metrics.update(self._backend_metrics())
        return metrics

    def _on_open(self, message: Open, now_s: float) -> None:
        why = self._refusal(message)
        if why:
            self._num_refused[why] += 1
            self._resync(message.router, message.seq, message.epoch, why)
            return
        held = self._sequences.get(message.seq)
        sequence = self._sequences.admit(self._new_sequence(message, now_s), now_s)
        if sequence is None:
            return
        if held is not None:
            held.end_span()
        if self.tracer is not None and sequence.spec.trace:
            sequence.span = self.tracer(sequence.spec.trace, sequence.seq)

    def _refusal(self, message: Open) -> str:
        """Why a sequence is not taken; empty if it is, or is here already."""
        if message.fingerprint and self.fingerprint and message.fingerprint != self.fingerprint:
            return "model"
        if message.numeric not in ("", self.numeric):
            return "numeric"
        is_here = self._sequences.current(message.seq, message.epoch) is not None
        return "draining" if self.is_draining and not is_here else ""

    def holds(self, seq: str) -> bool:
        """Whether a sequence is held, under any epoch."""
        return self._sequences.get(seq) is not None

    def renew(self, message: Live, now_s: float) -> None:
        """Renew the leases a router names; what is unknown here it is asked to open."""
        for seq, epoch in message.entries:
            sequence = self._sequences.current(seq, epoch)
            if sequence is not None:
                sequence.lease_s = message.lease_s or sequence.lease_s
                self._sequences.renew(sequence, now_s)
            else:
                self._resync(message.router, seq, epoch, "draining" if self.is_draining else "unknown")

    def _on_live(self, message: Live, now_s: float) -> None:
        self._routers.add(message.router)
        self.renew(message, now_s)
        self._tell_alive(message.router)

    def _tell_alive(self, router: str) -> None:
        self._outbox.put(router, Alive(self.name, self.metrics(), self.numeric))

    def _resync(self, router: str, seq: str, epoch: Epoch, why: str) -> None:
        sequence = self._sequences.get(seq)
        have = 0 if sequence is None else len(sequence.log)
        self._outbox.put(router, Resync(self.name, seq, epoch, have, why))

    def expire(self, now_s: float) -> None:
        """Let go of what nobody has renewed. A step does that first."""
        for sequence in self._sequences.expire(now_s):
            self._drop(sequence)

    def _drop(self, sequence: R | None) -> None:
        self._dropped(sequence)
        if sequence is not None:
            sequence.end_span()

    def _new_sequence(self, message: Open, now_s: float) -> R:
        raise NotImplementedError

    def _on_other(self, message: Message, now_s: float) -> None:
        raise NotImplementedError

    def _dropped(self, sequence: R | None) -> None:
        raise NotImplementedError


MOST_ALONE = 16
"""So many suspects, or fewer, are tried one at a time; more of them in two halves."""
MOST_ALONE_FAILURES = 2
"""A sequence that has failed alone so often is at fault."""
READ_IN_A_STEP = 256
"""Tokens that a step reads of prompts at the least, in all but the smallest services."""
PATIENT_TRIES = 4
"""Steps that suspects have between those of others, beside as many as their tokens take to be read."""
FORGIVEN_TOKENS = 64
"""So many tokens after a failure it is forgotten: what fails in the same place again fails long before."""

T = TypeVar("T")


def apart(members: Sequence[T]) -> list[list[T]]:
    """Groups in which suspects are tried: each alone, or two halves where they are many."""
    if len(members) <= MOST_ALONE:
        return [[member] for member in members]
    middle = (len(members) + 1) // 2
    return [list(members[:middle]), list(members[middle:])]


def is_at_fault(sequence: WorkerSequence) -> bool:
    """Whether a sequence that has just failed alone has done so before, and not long ago."""
    if len(sequence.log) - sequence.failed_length >= FORGIVEN_TOKENS:
        sequence.num_failures = 0
    sequence.num_failures += 1
    sequence.failed_length = len(sequence.log)
    return sequence.num_failures >= MOST_ALONE_FAILURES


class Suspect(Protocol):
    """A sequence that may be in quarantine.

    Attributes:
        suspects: Name of the group that it shares steps with; empty while it is not suspected.
        suspected: Groups with the least are tried first.
        log: All of its tokens.
    """

    suspects: str
    suspected: int
    log: TokenLog


S = TypeVar("S", bound=Suspect)


class StepGroups:
    """Which sequences of a worker may share a step. Sequences under suspicion share one with their own group only.

    A group is tried until each of its sequences has been decided. That takes many steps if long prompts are read again,
    so the others have every second step. But where memory is short, their steps may take what the group has read. So a
    group that takes longer than it should has its steps in a row.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_others_turn = False
        self._tried = ""
        self._num_tries = 0

    def suspect(self, sequence: Suspect, name: str = "") -> None:
        """Put a sequence into the group of a name; into one of its own where that is empty."""
        self._count += 1
        sequence.suspects = name or f"local/{self._count}"
        sequence.suspected = self._count

    def gather(self, sequences: Sequence[Suspect]) -> None:
        """Put sequences into a group of their own."""
        name = f"local/{self._count + 1}"
        for sequence in sequences:
            self.suspect(sequence, name)

    def divide(self, sequences: Sequence[Suspect]) -> None:
        """A step of these sequences has failed."""
        for group in apart(sequences):
            self.gather(group)

    def passed(self, sequence: Suspect) -> None:
        """A sequence has taken a step."""
        if sequence.suspects:
            sequence.suspects = ""
            self._num_tries = 0

    def step(self, sequences: Sequence[S], try_step: Callable[[Sequence[S]], bool]) -> bool:
        """Have a step of those whose turn it is, or of the next ones where these can do nothing.

        Args:
            sequences: All that may go on.
            try_step: A step of some of them. False if nothing was done in it.

        Returns:
            Whether a step did anything.
        """
        for batch in self.batches(sequences):
            name = batch[0].suspects if batch else ""
            if try_step(batch):
                self._is_others_turn = bool(name) and self._may_pause(name, batch)
                return True
        return False

    def _may_pause(self, name: str, group: Sequence[Suspect]) -> bool:
        """Whether the others have a step before a group, which has had one, has its next."""
        self._num_tries = 1 + (self._num_tries if name == self._tried else 0)
        self._tried = name
        return self._num_tries <= PATIENT_TRIES + sum(len(one.log) for one in group) // READ_IN_A_STEP

    def batches(self, sequences: Sequence[S]) -> Iterable[Sequence[S]]:
        """What the next step may take; each only if those before it found no room, or there is nothing in them."""
        if not any(sequence.suspects for sequence in sequences):
            yield sequences
            return
        others = [sequence for sequence in sequences if not sequence.suspects]
        name = min(
            (sequence for sequence in sequences if sequence.suspects), key=lambda sequence: sequence.suspected
        ).suspects
        group = [sequence for sequence in sequences if sequence.suspects == name]
        first, second = (others, group) if self._is_others_turn else (group, others)
        if first:
            yield first
        if first is group:  # it found no room, or its router does not know of it: another one may go on
            for sequence in group:
                self.suspect(sequence, name)
        yield second
