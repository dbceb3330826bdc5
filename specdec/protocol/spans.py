"""How machines tell of single sequences to whoever traces their requests; of all others they tell nothing.

A request that is traced has a label in its sequences' specs (:attr:`specdec.core.params.SequenceSpec.trace`). A
machine that has a :data:`Tracer` begins a span for such a sequence when it takes it, adds up what it does for it, and
ends the span when it holds it no more: one span a machine, however many rounds there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from specdec.core.messages import Interval


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
