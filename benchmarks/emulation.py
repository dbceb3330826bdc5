"""Backends that compute the real tokens and finish each step when an emulated device would.

What a machine without GPUs lacks is not the tokens but the time they take. Here a step ends at an emulated time, and
waits for it without holding a core, so that two GPUs cost two timers and what remains is what the system adds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from specdec.core.backends import (
    DraftBackend,
    DraftJob,
    Proposal,
    Status,
    TargetBackend,
    Verification,
    VerifyJob,
)

_MOST_LATENESS_S = 3e-4
"""What a sleep's lateness counts for at most: more than that is a busy core, not the timer."""

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_COST = re.compile(rf"({_NUMBER})(?:\+({_NUMBER})/row)?(?:\+({_NUMBER})/token)?")


class Clock(Protocol):
    """Where the time comes from, and how it passes."""

    def now_s(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Return ``duration_s`` later, without holding a core."""
        ...


class RealClock:
    """The machine's own clock.

    The kernel ends a sleep late, by a good part of a short step. So a sleep is asked to end earlier by what the last
    ones were late, and the rest is spent looking at the clock, giving way to whoever else wants the core or the
    interpreter.
    """

    def __init__(self) -> None:
        self._usual_lateness_s = 0.0

    def now_s(self) -> float:
        """See :meth:`Clock.now_s`."""
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        """See :meth:`Clock.sleep`; never returns early."""
        due_s = time.monotonic() + duration_s
        asked_s = duration_s - self._usual_lateness_s
        if asked_s > 0:
            time.sleep(asked_s)
            late_s = time.monotonic() - (due_s - self._usual_lateness_s)
            self._usual_lateness_s += (min(late_s, _MOST_LATENESS_S) - self._usual_lateness_s) / 8
        while time.monotonic() < due_s:
            time.sleep(0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step, in milliseconds: ``base_ms + row_ms * rows + token_ms * tokens``.

    Memory-bound steps are all base (reading the weights once); what computing adds is counted by token.
    """

    base_ms: float
    row_ms: float = 0.0
    token_ms: float = 0.0

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        """Time of one step over a ragged batch, in seconds."""
        return (self.base_ms + self.row_ms * num_rows + self.token_ms * num_tokens) / 1e3


def step_cost(text: str) -> StepCost:
    """Read a cost such as ``30+0.02/token``.

    Raises:
        ValueError: For anything else, with what is allowed.
    """
    match = _COST.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"a step's cost must be written as 30, 30+1/row or 30+1/row+0.02/token, in ms, not {text!r}")
    return StepCost(*(float(term or 0) for term in match.groups()))


@dataclass(slots=True)
class EmulationCounters:
    """What an emulated device has done since it started.

    Attributes:
        num_emulated_steps: Steps that ended at an emulated time.
        num_overruns: Steps whose real computation took longer than the emulated time: their figures are not emulated.
        overrun_s: By how much, in sum.
        late_wake_s: By how much the waits ended late, in sum: the emulation's own error.
    """

    num_emulated_steps: int = 0
    num_overruns: int = 0
    overrun_s: float = 0.0
    late_wake_s: float = 0.0


class EmulatedDevice:
    """The clock of one device.

    Args:
        cost: Time of a step.
        clock: Where the time comes from.
    """

    def __init__(self, cost: StepCost, clock: Clock | None = None) -> None:
        self.cost = cost
        self.counters = EmulationCounters()
        self._clock = clock if clock is not None else RealClock()
        self._known: dict[str, int] = {}

    def now_s(self) -> float:
        """The device's time."""
        return self._clock.now_s()

    def finish(self, started_s: float, num_rows: int, num_tokens: int) -> None:
        """Wait until a step that began at ``started_s`` is over; count it if there was not enough time."""
        if not num_rows:
            return
        counters = self.counters
        counters.num_emulated_steps += 1
        left_s = started_s + self.cost.seconds(num_rows, num_tokens) - self._clock.now_s()
        if left_s < 0:
            counters.num_overruns += 1
            counters.overrun_s -= left_s
            return
        due_s = self._clock.now_s() + left_s
        self._clock.sleep(left_s)
        counters.late_wake_s += max(0.0, self._clock.now_s() - due_s)

    def num_new_tokens(self, key: str, length: int, num_draft_tokens: int, kept_length: int) -> int:
        """Tokens a device would forward for a row, and remember what it has cached after it.

        Tokens read in several steps are counted with the last of them.

        Args:
            key: Of the row.
            length: Tokens it is to have read.
            num_draft_tokens: Tokens to verify after them.
            kept_length: What stays cached after the step.
        """
        known = min(self._known.get(key, 0), length - 1)
        self._known[key] = kept_length
        return length - known + num_draft_tokens

    def rename(self, key: str, new_key: str) -> None:
        """A branch has become a sequence."""
        if key in self._known:
            self._known[new_key] = self._known.pop(key)

    def fork(self, key: str, origin: str) -> None:
        """A branch begins with what is cached for its sequence."""
        if key not in self._known and origin in self._known:
            self._known[key] = self._known[origin]

    def release(self, key: str) -> None:
        """Nothing is cached for a row any more."""
        self._known.pop(key, None)

    def metrics(self) -> dict[str, float]:
        """The counters, for the worker's metrics."""
        return {f"backend/{name}": float(value) for name, value in asdict(self.counters).items()}


class Around:
    """A backend that leaves to another one whatever it does not do itself."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class EmulatedTarget(Around):
    """A :class:`specdec.core.backends.TargetBackend` on an emulated device; the tokens are the inner backend's."""

    def __init__(self, inner: TargetBackend, device: EmulatedDevice) -> None:
        super().__init__(inner)
        self.device = device

    def metrics(self) -> dict[str, float]:
        """The inner backend's, and what was emulated."""
        return self._inner.metrics() | self.device.metrics()

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """The inner backend's step; returns when the emulated device would."""
        started_s = self.device.now_s()
        results = self._inner.verify(jobs)
        worked = [(job, result) for job, result in zip(jobs, results, strict=True) if _worked(result)]
        num_tokens = 0
        for job, result in worked:
            length = len(job.log)
            if result.status is Status.DECIDED:
                kept_length = length + result.num_accepted
                num_tokens += self.device.num_new_tokens(job.key, length, result.num_drafted, kept_length)
        self.device.finish(started_s, len(worked), num_tokens)
        return results

    def release(self, key: str) -> None:
        """Free everything held for a sequence."""
        self.device.release(key)
        self._inner.release(key)


class EmulatedDrafter(Around):
    """A :class:`specdec.core.backends.DraftBackend` on an emulated device; the tokens are the inner backend's."""

    def __init__(self, inner: DraftBackend, device: EmulatedDevice) -> None:
        super().__init__(inner)
        self.device = device

    def metrics(self) -> dict[str, float]:
        """The inner backend's, and what was emulated."""
        return self._inner.metrics() | self.device.metrics()

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """The inner backend's step; returns when the emulated device would."""
        started_s = self.device.now_s()
        results = self._inner.propose(jobs)
        num_rows = num_tokens = 0
        device, decided, waiting = self.device, Status.DECIDED, Status.WAITING
        for job, result in zip(jobs, results, strict=True):
            status = result.status
            if status is not waiting:
                num_rows += 1
            if status is decided:
                length = len(job.tokens)
                if job.fork_of is not None:
                    device.fork(job.key, job.fork_of)
                num_tokens += device.num_new_tokens(job.key, length, len(result.further), length)
        device.finish(started_s, num_rows, num_tokens)
        return results

    def rename(self, key: str, new_key: str) -> None:
        """What is held for a branch is its sequence's from now on."""
        self.device.rename(key, new_key)
        self._inner.rename(key, new_key)

    def release(self, key: str) -> None:
        """Free everything held for a sequence or branch."""
        self.device.release(key)
        self._inner.release(key)


def _worked(result: Verification | Proposal) -> bool:
    return result.status is not Status.WAITING
