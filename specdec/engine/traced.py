"""Machines whose messages and turns are recorded."""

from __future__ import annotations

from typing import Any, Protocol

from specdec.engine.trace import Recorder


class Machine(Protocol):
    """A state machine, as whoever drives it sees it."""

    def receive(self, message: Any, now_s: float) -> None:
        """Take in one message."""
        ...

    def step(self, now_s: float) -> bool:
        """Do a piece of work; True if there may be more."""
        ...

    def take_outbox(self) -> dict[str, list[Any]]:
        """Messages since the last call, by peer id."""
        ...

    def unsendable(self, message: Any, reason: str, now_s: float) -> None:
        """A message that it has put out is too long to be sent; what it was for ends with an error."""
        ...

    def drain(self, now_s: float) -> None:
        """Take nothing new from now on."""
        ...

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left to finish."""
        ...


def traced(machine: Machine, recorder: Recorder | None) -> Machine:
    """The machine, recorded where there is a recorder."""
    return machine if recorder is None else TracedMachine(machine, recorder)


class TracedMachine:
    """A machine whose messages are recorded, and those of its turns in which it worked.

    Args:
        inner: The machine.
        recorder: Its own.
    """

    def __init__(self, inner: Machine, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def receive(self, message: Any, now_s: float) -> None:
        """Take in one message."""
        self._recorder.received(message)
        self._inner.receive(message, now_s)

    def step(self, now_s: float) -> bool:
        """Do a piece of work; True if there may be more."""
        start_ns = self._recorder.clock_ns()
        worked = self._inner.step(now_s)
        if worked:
            self._recorder.turned(start_ns)
        return worked

    def take_outbox(self) -> dict[str, list[Any]]:
        """Messages since the last call, by peer id."""
        outbox = self._inner.take_outbox()
        for peer, messages in outbox.items():
            self._recorder.sent(peer, messages)
        return outbox

    def unsendable(self, message: Any, reason: str, now_s: float) -> None:
        """A message is too long to be sent."""
        self._inner.unsendable(message, reason, now_s)

    def drain(self, now_s: float) -> None:
        """Take nothing new from now on."""
        self._inner.drain(now_s)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left to finish."""
        return self._inner.is_drained
