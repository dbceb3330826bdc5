"""Backends that report their steps: one record a step, to each listener."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from specdec.core.backends import (
    DraftBackend,
    DraftJob,
    Proposal,
    Status,
    TargetBackend,
    Verification,
    VerifyJob,
)
from specdec.drafting.plans import WorkerKind


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of a backend in which anything was done.

    Attributes:
        start_ns: When the backend was called, by the observer's clock.
        end_ns: When it had answered.
        since_ns: From when on the step takes its device's time. What a drafter does between two steps is part of the
            later one, unless it rested there: a draft of K tokens takes K of both. Of a target it is ``start_ns``.
        num_rows: Rows that did not wait for room.
        num_tokens: Tokens decided on: 1 + K in a row of a target that verifies K draft tokens, 1 in a drafter's. What
            is read of a prompt is not counted.
        num_draft_tokens: How many of them were draft tokens; 0 of a drafter.
        is_decode: Whether every row has its result, and had one in its step before: no prompt is read, no lost state
            built again, and nobody waits. Branches of a draft count from their first step on.
        goes_on: Whether a row was in the step before, too.
        num_passes: Forward passes, one after another, that the step is made of.
    """

    role: WorkerKind
    start_ns: int
    end_ns: int
    since_ns: int
    num_rows: int
    num_tokens: int
    num_draft_tokens: int
    is_decode: bool
    goes_on: bool
    num_passes: int

    @property
    def duration_s(self) -> float:
        """From the call to the answer, in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class VerifyRecord(StepRecord):
    """A step of a target: its jobs, and the result of each."""

    jobs: Sequence[VerifyJob]
    results: Sequence[Verification]


@dataclass(frozen=True, slots=True)
class DraftRecord(StepRecord):
    """A step of a drafter: its jobs, and the result of each."""

    jobs: Sequence[DraftJob]
    results: Sequence[Proposal]


StepListener = Callable[[StepRecord], None]
"""Called with each step as it ends, in the thread of the step: it must be quick, and copy what it wants of jobs."""


class _Rows:
    """Which rows have a result, and which were in the newest step."""

    def __init__(self) -> None:
        self._settled: set[str] = set()
        self._last: set[str] = set()

    def settle(self, key: str, status: Status) -> bool:
        """A row's step has ended thus; whether it has a result and had one before."""
        was_settled = key in self._settled
        (self._settled.add if status is Status.DECIDED else self._settled.discard)(key)
        return was_settled and status is Status.DECIDED

    def go_on(self, keys: set[str]) -> bool:
        """The newest step had these rows; whether any of them was in the one before."""
        goes_on, self._last = not keys.isdisjoint(self._last), keys
        return goes_on

    def release(self, key: str) -> None:
        self._settled.discard(key)


class ObservedTarget:
    """A target backend that reports its steps.

    Args:
        inner: Does the work.
        listeners: Called with each step, in their order.
        clock_ns: Nanoseconds, of a clock that never goes back.

    Attributes:
        inner: As given.
    """

    def __init__(
        self, inner: TargetBackend, listeners: Sequence[StepListener], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.inner = inner
        self._listeners = tuple(listeners)
        self._clock_ns = clock_ns
        self._rows = _Rows()

    @property
    def max_model_len(self) -> int:
        """Of the inner backend."""
        return self.inner.max_model_len

    def metrics(self) -> dict[str, float]:
        """What the inner backend holds now."""
        return self.inner.metrics()

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """The inner backend's step, reported."""
        begun_ns = [self._clock_ns()]
        unread = next((job.unread for job in jobs if job.unread is not None), None)
        if unread is not None:  # until they are read, its drafts are drawn
            unread.when_read(lambda _: begun_ns.append(self._clock_ns()))
        results = self.inner.verify(jobs)
        start_ns, end_ns = begun_ns[-1], self._clock_ns()
        statuses = [result.status for result in results]
        settled = [self._rows.settle(job.key, status) for job, status in zip(jobs, statuses, strict=True)]
        keys = {job.key for job, status in zip(jobs, statuses, strict=True) if status is not Status.WAITING}
        if not keys:
            return results
        num_drafted = sum([result.num_drafted for result in results])
        record = VerifyRecord(
            "target",
            start_ns,
            end_ns,
            since_ns=start_ns,
            num_rows=len(keys),
            num_tokens=statuses.count(Status.DECIDED) + num_drafted,
            num_draft_tokens=num_drafted,
            is_decode=all(settled),
            goes_on=self._rows.go_on(keys),
            num_passes=1,
            jobs=jobs,
            results=results,
        )
        for listener in self._listeners:
            listener(record)
        return results

    def release(self, key: str) -> None:
        """Free everything held for a sequence."""
        self._rows.release(key)
        self.inner.release(key)


class ObservedDrafter:
    """A draft backend that reports its steps; see :class:`ObservedTarget`."""

    def __init__(
        self, inner: DraftBackend, listeners: Sequence[StepListener], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.inner = inner
        self._listeners = tuple(listeners)
        self._clock_ns = clock_ns
        self._rows = _Rows()
        self._last_ns: int | None = None

    @property
    def max_model_len(self) -> int:
        """Of the inner backend."""
        return self.inner.max_model_len

    def metrics(self) -> dict[str, float]:
        """What the inner backend holds now."""
        return self.inner.metrics()

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """The inner backend's step, reported."""
        start_ns = self._clock_ns()
        results = self.inner.propose(jobs)
        unread = next((one.unread for one in results if one.unread is not None), None)
        if unread is None:
            self._report(jobs, start_ns, results)
        else:
            unread.when_read(partial(self._report, jobs, start_ns))
        return results

    def _report(self, jobs: Sequence[DraftJob], start_ns: int, results: Sequence[Proposal]) -> None:
        end_ns = self._clock_ns()
        since_ns, self._last_ns = start_ns if self._last_ns is None else self._last_ns, end_ns
        statuses = [result.status for result in results]
        num_decided, num_rows = statuses.count(Status.DECIDED), len(jobs) - statuses.count(Status.WAITING)
        is_decode, keys = num_decided == len(jobs), set[str]()
        for job, status in zip(jobs, statuses, strict=True):
            if job.fork_of is not None:
                break  # branches come last, and begin with what is held for their sequences
            is_decode = self._rows.settle(job.key, status) and is_decode
            keys.add(job.key)
        if not num_rows:
            return
        record = DraftRecord(
            "drafter",
            start_ns,
            end_ns,
            since_ns,
            num_rows,
            num_tokens=num_decided + sum(len(result.further) for result in results),
            num_draft_tokens=0,
            is_decode=is_decode,
            goes_on=self._rows.go_on(keys),
            num_passes=max(result.num_passes for result in results),
            jobs=jobs,
            results=results,
        )
        for listener in self._listeners:
            listener(record)

    def rest(self) -> None:
        """A step found nothing to draft: the time until the next one is nobody's."""
        self._last_ns = None
        self.inner.rest()

    def rename(self, key: str, new_key: str) -> None:
        """What is held for a branch is its sequence's from now on."""
        self.inner.rename(key, new_key)

    def release(self, key: str) -> None:
        """Free everything held for a sequence or branch."""
        self._rows.release(key)
        self.inner.release(key)
