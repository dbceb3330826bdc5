"""What a process holds for others: one row per sequence, under a lease, and a tombstone after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from specdec.core.messages import Inc, Message


@dataclass(frozen=True, slots=True)
class Times:
    """The protocol's clock. All in seconds, but for ``max_unacked_tokens``.

    Attributes:
        lease_s: What nobody renews for so long is freed.
        renew_interval_s: Period of Live and Want, which renew; a small part of a lease.
        retry_interval_s: A verdict or commit that is not acknowledged for so long is sent again.
        renew_grace_s: Live and Want leave out what was opened less than this long ago, lest they overtake its opening.
        peer_timeout_s: A peer that says nothing for so long counts as dead. The end of its stream tells much sooner.
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
class Row:
    """What is held for one sequence."""

    seq: str
    inc: Inc
    lease_s: float
    lease_until_s: float = field(default=0.0, init=False)


R = TypeVar("R", bound=Row)


class LeasedRows(Generic[R]):
    """Rows under leases and tombstones: rules 4 and 5 of the protocol, the same for routers, targets and drafters."""

    def __init__(self, tombstone_s: float) -> None:
        self._tombstone_s = tombstone_s
        self._rows: dict[str, R] = {}
        self._tombstones: dict[str, tuple[Inc, float]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._rows.values()))

    def get(self, seq: str) -> R | None:
        """The row of a sequence under whatever inc."""
        return self._rows.get(seq)

    def current(self, seq: str, inc: Inc) -> R | None:
        """The row of a sequence, if it is held under exactly this inc."""
        row = self._rows.get(seq)
        return row if row is not None and row.inc == inc else None

    def renew(self, row: R, now_s: float) -> None:
        """Somebody still wants this row."""
        row.lease_until_s = now_s + row.lease_s

    def admit(self, row: R, now_s: float) -> R | None:
        """Take a row in, unless it is known or buried under the same or a newer inc.

        Returns:
            The row that it is now held in: ``row`` itself. None if it was refused; the lease of a row held under the
            same inc is then renewed.
        """
        held = self._rows.get(row.seq)
        if held is not None and row.inc <= held.inc:
            if row.inc == held.inc:
                self.renew(held, now_s)
            return None
        if held is None and self._is_buried(row.seq, row.inc, now_s):
            return None
        self._rows[row.seq] = row
        self.renew(row, now_s)
        return row

    def drop(self, seq: str, inc: Inc, now_s: float) -> R | None:
        """Bury a sequence under ``inc``; frees the row held under the same or an older one, and returns it."""
        held = self._rows.get(seq)
        if held is not None and inc < held.inc:
            return None
        buried = self._tombstones.get(seq)
        if buried is None or buried[1] < now_s or inc >= buried[0]:
            self._tombstones.pop(seq, None)  # the oldest stay in front
            self._tombstones[seq] = inc, now_s + self._tombstone_s
        return self._rows.pop(seq, None)

    def expire(self, now_s: float) -> list[R]:
        """Bury all rows whose lease has run out; forgets tombstones that have stood long enough."""
        expired = [row for row in self._rows.values() if row.lease_until_s < now_s]
        for row in expired:
            self.drop(row.seq, row.inc, now_s)
        while self._tombstones:
            seq = next(iter(self._tombstones))
            if self._tombstones[seq][1] >= now_s:
                break
            del self._tombstones[seq]
        return expired

    def _is_buried(self, seq: str, inc: Inc, now_s: float) -> bool:
        tombstone = self._tombstones.get(seq)
        return tombstone is not None and now_s <= tombstone[1] and inc <= tombstone[0]
