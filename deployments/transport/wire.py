"""What the two ends of a link say to each other beside the messages they carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.errors import SpecdecError

Batch = tuple[Any, ...]
"""Messages that travel together: one item of a stream. An empty batch is a heartbeat."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls whom, for which link.

    Attributes:
        caller: Replica id of the caller.
        callee: Replica id the caller means. Serve may send a pinned call elsewhere after a death, so the callee
            compares.
        link: Name of the link, unique for each attempt; the two streams of one link carry the same.
    """

    caller: str
    callee: str
    link: str


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first item of every stream.

    Attributes:
        replica: Replica id of the callee.
        refusal: Why the callee will not open this link; None if it does.
    """

    replica: str
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Where a replica runs, for operators and tests."""

    deployment: str
    replica: str
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How patient the ends of a link are.

    Attributes:
        open_timeout_s: Longest wait for the greeting of a new stream.
        heartbeat_s: An idle stream carries an empty batch this often.
        silence_s: A stream that carries nothing for so long is lost: the peer hangs, or its host is gone. A peer that
            dies is seen at once, by the end of its stream.
        first_backoff_s: Pause before a lost link is opened again; doubled with each failure.
        max_backoff_s: Longest such pause.
    """

    open_timeout_s: float = 5.0
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class LinkError(SpecdecError):
    """A link ended, or could not be opened; the sender of a lost message is not told."""


class LinkRefusedError(LinkError):
    """The callee will not open the link: it is another replica than the one meant, or it is shutting down."""


class HostFailedError(SpecdecError):
    """The machine of this replica has raised, or makes no progress; the replica has to be replaced."""
