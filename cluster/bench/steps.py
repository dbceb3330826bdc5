"""Steps one by one: backends that note when each began and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cluster.bench.measures import Step
from specdec.engine.forwarding import ForwardingDrafter, ForwardingTarget
from specdec.protocol.backends import (
    DraftBackend,
    DraftJob,
    Proposal,
    Status,
    TargetBackend,
    Verification,
    VerifyJob,
)

Note = Callable[[Step], None]
"""Is told of a step as it ends."""


class NotedTarget(ForwardingTarget):
    """A target backend whose steps are noted.

    Args:
        inner: Does the work.
        note: Is told of every step that did anything.
        clock: Seconds.
    """

    def __init__(self, inner: TargetBackend, note: Note, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._note = note
        self._clock = clock
        self._begun: set[str] = set()
        self._last: set[str] = set()

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """The inner backend's step, noted."""
        started_s = self._clock()
        results = self._inner.verify(jobs)
        ended_s = self._clock()
        statuses = [result.status for result in results]
        decided = [result for result in results if result.status is Status.DECIDED]
        keys = {job.key for job, status in zip(jobs, statuses, strict=True) if status is not Status.WAITING}
        if keys:
            num_tokens = len(decided) + sum([result.num_drafted for result in decided])
            is_prefill, goes_on = not keys <= self._begun, not keys.isdisjoint(self._last)
            self._note(Step("target", started_s, ended_s, len(keys), num_tokens, is_prefill, goes_on))
            self._last = keys
            if is_prefill:
                pairs = zip(jobs, statuses, strict=True)
                self._begun |= {job.key for job, status in pairs if status is Status.DECIDED}
        return results

    def release(self, key: str) -> None:
        """Free everything held for a sequence."""
        self._begun.discard(key)
        self._inner.release(key)


class NotedDrafter(ForwardingDrafter):
    """A draft backend whose steps are noted; see :class:`NotedTarget`."""

    def __init__(self, inner: DraftBackend, note: Note, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._note = note
        self._clock = clock
        self._begun: set[str] = set()

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """The inner backend's step, noted."""
        started_s = self._clock()
        results = self._inner.propose(jobs)
        statuses = [result.status for result in results]
        num_worked, num_decided = len(jobs) - statuses.count(Status.WAITING), statuses.count(Status.DECIDED)
        is_prefill = False
        for job, status in zip(jobs, statuses, strict=True):
            if job.fork_of is not None:
                break  # branches come last, and begin with what is held for their sequences
            is_prefill |= status is not Status.WAITING and job.key not in self._begun
            if status is Status.DECIDED:
                self._begun.add(job.key)
        if num_worked:
            self._note(Step("draft", started_s, self._clock(), num_worked, num_decided, is_prefill))
        return results

    def release(self, key: str) -> None:
        """Free everything held for a sequence or branch."""
        self._begun.discard(key)
        self._inner.release(key)


class BusyTime:
    """Sums up the time in steps; a note for a worker's report.

    Args:
        clock: Seconds, the one that the steps are timed with.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_s = self._gap_s = 0.0
        self._num_gaps = 0
        self._ended_s = 0.0

    def __call__(self, step: Step) -> None:
        """Count a step."""
        self._busy_s += step.duration_s
        if step.goes_on:
            self._gap_s += step.started_s - self._ended_s
            self._num_gaps += 1
        self._ended_s = step.ended_s

    def gauges(self) -> dict[str, float]:
        """``busy_s``, gaps between steps, and ``report_s``: the clock now, so that two reports give a share of time."""
        gaps = {"gap_s": self._gap_s, "num_gaps": float(self._num_gaps)}
        return {"busy_s": self._busy_s, **gaps, "report_s": self._clock()}
