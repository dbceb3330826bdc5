"""What a process holds for others: sequences, each under a lease, with a tombstone after it.

How log lines name sequences: by ``seq``, and by the client's request, for whoever looks for that.

How machines tell of single sequences to whoever traces their requests; of all others they tell nothing.

A request that is traced has a label in its sequences' specs (:attr:`specdec.core.params.SequenceSpec.trace`). A
machine that has a :data:`Tracer` begins a span for such a sequence when it takes it, adds up what it does for it, and
ends the span when it holds it no more: one span a machine, however many rounds there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from specdec.core.messages import Epoch, Interval, Message
from specdec.core.params import SequenceSpec


@dataclass(frozen=True, slots=True)
class Times:
    """The protocol's clock. All in seconds, but for ``max_unacked_tokens``.

    Attributes:
        lease_s: What nobody renews for so long is freed.
        renew_interval_s: Period of Live and Want, which renew; a small part of a lease.
        retry_interval_s: A verdict or commit that is not acknowledged for so long is sent again.
        renew_grace_s: Live and Want leave out what was opened less than this long ago, lest they overtake its opening.
        peer_timeout_s: An ingress submits a request elsewhere when its router says nothing of it for so long. The end
            of a link tells much sooner.
        max_unacked_tokens: Most tokens a target commits past the last acknowledgement.
    """

    lease_s: float = 5.0
    renew_interval_s: float = 1.0
    retry_interval_s: float = 0.5
    renew_grace_s: float = 0.5
    peer_timeout_s: float = 30.0
    max_unacked_tokens: int = 256

    def repeat_after_s(self, num_prompt_logprobs: int) -> float:
        """After how long what tells of so many prompt tokens is sent again: it is long, and takes long to arrive."""
        return self.retry_interval_s * (1 + num_prompt_logprobs / 1000)

    @property
    def tombstone_s(self) -> float:
        """How long a tombstone stands."""
        return 10 * self.lease_s


class Outbox:
    """Messages on their way out, by the name of the peer they are for."""

    def __init__(self) -> None:
        self._messages: dict[str, list[Message]] = {}

    def put(self, peer: str, message: Message) -> None:
        """Add a message for a peer."""
        self._messages.setdefault(peer, []).append(message)

    def take(self) -> dict[str, list[Message]]:
        """All messages since the last call, in the order in which they were put."""
        messages, self._messages = self._messages, {}
        return messages


@dataclass(slots=True, kw_only=True)
class LeasedSequence:
    """What is held for one sequence."""

    seq: str
    epoch: Epoch
    lease_s: float
    lease_until_s: float = field(default=0.0, init=False)


R = TypeVar("R", bound=LeasedSequence)


class LeasedSequences(Generic[R]):
    """Sequences under leases and tombstones: rules 4 and 5 of the protocol, for routers, targets and drafters."""

    def __init__(self, tombstone_s: float) -> None:
        self._tombstone_s = tombstone_s
        self._sequences: dict[str, R] = {}
        self._tombstones: dict[str, tuple[Epoch, float]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._sequences.values()))

    def get(self, seq: str) -> R | None:
        """A sequence under any epoch."""
        return self._sequences.get(seq)

    def current(self, seq: str, epoch: Epoch) -> R | None:
        """A sequence, if it is held under exactly this epoch."""
        sequence = self._sequences.get(seq)
        return sequence if sequence is not None and sequence.epoch == epoch else None

    def renew(self, sequence: R, now_s: float) -> None:
        """Somebody still wants this sequence."""
        sequence.lease_until_s = now_s + sequence.lease_s

    def admit(self, sequence: R, now_s: float) -> R | None:
        """Take a sequence in, unless it is known or buried under the same or a newer epoch.

        Returns:
            ``sequence`` itself, which is held now. None if it was refused; one that is held under the same epoch is
            then renewed.
        """
        held = self._sequences.get(sequence.seq)
        if held is not None and sequence.epoch <= held.epoch:
            if sequence.epoch == held.epoch:
                self.renew(held, now_s)
            return None
        if held is None and self._is_buried(sequence.seq, sequence.epoch, now_s):
            return None
        self._sequences[sequence.seq] = sequence
        self.renew(sequence, now_s)
        return sequence

    def drop(self, seq: str, epoch: Epoch, now_s: float) -> R | None:
        """Bury a sequence under ``epoch``; frees the sequence held under the same or an older one, and returns it."""
        held = self._sequences.get(seq)
        if held is not None and epoch < held.epoch:
            return None
        buried = self._tombstones.get(seq)
        if buried is None or buried[1] < now_s or epoch >= buried[0]:
            self._tombstones.pop(seq, None)  # the oldest stay in front
            self._tombstones[seq] = epoch, now_s + self._tombstone_s
        return self._sequences.pop(seq, None)

    def expire(self, now_s: float) -> list[R]:
        """Bury all sequences whose lease has run out; forgets tombstones that have stood long enough."""
        expired = [sequence for sequence in self._sequences.values() if sequence.lease_until_s < now_s]
        for sequence in expired:
            self.drop(sequence.seq, sequence.epoch, now_s)
        while self._tombstones:
            seq = next(iter(self._tombstones))
            if self._tombstones[seq][1] >= now_s:
                break
            del self._tombstones[seq]
        return expired

    def _is_buried(self, seq: str, epoch: Epoch, now_s: float) -> bool:
        tombstone = self._tombstones.get(seq)
        return tombstone is not None and now_s <= tombstone[1] and epoch <= tombstone[0]


_MOST_NAMED = 16


class Named(Protocol):
    """A request, a session or a sequence."""

    seq: str
    spec: SequenceSpec


def label(sequence: Named) -> str:
    """The name of a sequence in a log line."""
    request_id = sequence.spec.request_id
    return f"{sequence.seq} (request {request_id})" if request_id else sequence.seq


def labels(sequences: Sequence[Named]) -> str:
    """The names of several; of many the first, and how many more there are."""
    named = ", ".join(map(label, sequences[:_MOST_NAMED]))
    return named if len(sequences) <= _MOST_NAMED else f"{named} and {len(sequences) - _MOST_NAMED} more"


class Span(Protocol):
    """A sequence on one machine."""

    @property
    def label(self) -> str:
        """What sequences carry for those who work for this machine; their spans are below this one."""
        ...

    def add(self, **counts: int) -> None:
        """Add to sums, by their names."""
        ...

    def end(self, finish: str = "") -> None:
        """The machine holds the sequence no more; called once.

        Args:
            finish: How it ended there; empty where that is not this machine's to say, or it was closed before.
        """
        ...


def microseconds(interval: Interval) -> int:
    """How long something took."""
    start_s, end_s = interval
    return round((end_s - start_s) * 1e6)


Tracer = Callable[[str, str], Span]
"""Begins the span of a sequence, given its label and its ``seq``."""
