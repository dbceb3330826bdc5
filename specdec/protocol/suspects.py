"""Rule 16: whoever was in a step that failed is apart from others until it has taken a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

MOST_ALONE = 16
"""So many suspects, or fewer, are tried one at a time; more of them in two halves."""
MOST_ALONE_FAILURES = 2
"""A sequence that has failed alone so often is at fault."""
FORGIVEN_TOKENS = 64
"""So many tokens after a failure it is forgotten: what fails in the same place again fails long before."""

T = TypeVar("T")


def apart(members: Sequence[T]) -> list[list[T]]:
    """Groups in which suspects are tried: each alone, or two halves where they are many."""
    if len(members) <= MOST_ALONE:
        return [[member] for member in members]
    middle = (len(members) + 1) // 2
    return [list(members[:middle]), list(members[middle:])]


class Suspect(Protocol):
    """A row that may be on probation.

    Attributes:
        suspects: Name of the group that it shares steps with; empty while it is not suspected.
        suspected: Groups with the least are tried first.
    """

    suspects: str
    suspected: int


S = TypeVar("S", bound=Suspect)


class StepGroups:
    """Which rows of a worker may share a step. Rows under suspicion share one with their own group only.

    A group is tried before all others, and until each of its rows has taken a step. After it the others have a step,
    before the next group has one.
    """

    def __init__(self) -> None:
        self._count = 0
        self._others_first = False

    def suspect(self, row: Suspect, name: str = "") -> None:
        """Put a row into the group of a name; into one of its own where that is empty."""
        self._count += 1
        row.suspects = name or f"local/{self._count}"
        row.suspected = self._count

    def divide(self, rows: Sequence[Suspect]) -> None:
        """A step of these rows has failed."""
        for group in apart(rows):
            name = f"local/{self._count + 1}"
            for row in group:
                self.suspect(row, name)

    def passed(self, row: Suspect) -> None:
        """A row has taken a step."""
        if row.suspects:
            row.suspects = ""
            self._others_first = True

    def batches(self, rows: Sequence[S]) -> Iterable[Sequence[S]]:
        """What the next step may take; each only if those before it found no room, or there is nothing in them."""
        if not any(row.suspects for row in rows):
            yield rows
            return
        others = [row for row in rows if not row.suspects]
        name = min((row for row in rows if row.suspects), key=lambda row: row.suspected).suspects
        group = [row for row in rows if row.suspects == name]
        first, second = (others, group) if self._others_first else (group, others)
        self._others_first = False
        if first:
            yield first
        if first is group:  # it found no room: another one may
            for row in group:
                self.suspect(row, name)
        yield second
