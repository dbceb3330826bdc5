"""How log lines name sequences: by ``seq``, and by the client's request, for whoever looks for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdec.core.params import SequenceSpec

_MOST_NAMED = 16


class Named(Protocol):
    """A request, a session or a row."""

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
