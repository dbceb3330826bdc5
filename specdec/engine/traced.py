"""Machines and backends whose steps and messages are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specdec.engine.forwarding import ForwardingDrafter, ForwardingTarget
from specdec.engine.trace import Recorder
from specdec.protocol.backends import DraftBackend, DraftJob, Proposal, TargetBackend, Verification, VerifyJob


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
        start_ns = self._recorder.turns()
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


class TracedTarget(ForwardingTarget):
    """A target backend whose steps are recorded."""

    def __init__(self, inner: TargetBackend, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """The inner backend's step, recorded."""
        start_ns = self._recorder.clock_ns()
        results = self._inner.verify(jobs)
        self._recorder.verified(start_ns, jobs, results)
        return results


class TracedDrafter(ForwardingDrafter):
    """A draft backend whose steps are recorded."""

    def __init__(self, inner: DraftBackend, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """The inner backend's step, recorded."""
        start_ns = self._recorder.clock_ns()
        proposals = self._inner.propose(jobs)
        self._recorder.drafted(start_ns, jobs, proposals)
        return proposals
