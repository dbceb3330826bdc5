"""How long a worker's steps take, by how much is in them: what the controller plans with."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

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
from specdec.protocol.worker import Gauges

_SAMPLES_KEPT = 31
_BUCKETS_KEPT = 48
_BUCKETS_PER_OCTAVE = 4


class StepTimer:
    """Durations of steps, by rows and tokens, in buckets a quarter of an octave wide.

    Of each bucket the newest samples are kept and their median is reported, so that a pause of the process, or a
    neighbour on the same device, does not count for more than the one step that it hit. Buckets unused for longest are
    forgotten first.
    """

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[int, int], deque[tuple[int, int, float]]] = OrderedDict()

    def add(self, num_rows: int, num_tokens: int, duration_s: float) -> None:
        """A step of so many rows and tokens, at least one of each, took so many seconds."""
        key = _bucket(num_rows), _bucket(num_tokens)
        if key not in self._buckets:
            self._buckets[key] = deque(maxlen=_SAMPLES_KEPT)
            while len(self._buckets) > _BUCKETS_KEPT:
                self._buckets.popitem(last=False)
        self._buckets[key].append((num_rows, num_tokens, duration_s))
        self._buckets.move_to_end(key)

    def report(self) -> dict[str, float]:
        """Per bucket ``step/<i>/rows`` and ``step/<i>/tokens`` (means), ``.../seconds`` (median), ``.../num_steps``."""
        figures: dict[str, float] = {}
        for i, samples in enumerate(self._buckets.values()):
            rows, tokens, seconds = zip(*samples, strict=True)
            figures[f"step/{i}/rows"] = statistics.fmean(rows)
            figures[f"step/{i}/tokens"] = statistics.fmean(tokens)
            figures[f"step/{i}/seconds"] = statistics.median(seconds)
            figures[f"step/{i}/num_steps"] = float(len(samples))
        return figures


def _bucket(count: int) -> int:
    """Buckets of one up to 8, then a quarter of an octave wide."""
    if count <= 2 * _BUCKETS_PER_OCTAVE:
        return count
    octave = count.bit_length() - 1
    return _BUCKETS_PER_OCTAVE * octave + ((count - (1 << octave)) * _BUCKETS_PER_OCTAVE >> octave)


class TimedTarget(ForwardingTarget):
    """A target backend, and how long its verifications take.

    Steps that read a prompt, or rebuild what was taken from a sequence, are left out.

    Args:
        backend: Does the work.
        gauges: Of the backend, to which the times are added.
        clock: Seconds.
    """

    def __init__(
        self, backend: TargetBackend, gauges: Gauges | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(backend)
        self._gauges = gauges
        self._clock = clock
        self._timer = StepTimer()
        self._settled: set[str] = set()

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """One step, timed."""
        before_s = self._clock()
        results = self._inner.verify(jobs)
        duration_s = self._clock() - before_s
        statuses = [result.status for result in results]
        if statuses.count(Status.DECIDED) == len(jobs) and self._settled.issuperset([job.key for job in jobs]):
            if jobs:
                num_drafted = sum([result.num_drafted for result in results])
                self._timer.add(len(jobs), len(jobs) + num_drafted, duration_s)
            return results
        for job, status in zip(jobs, statuses, strict=True):
            (self._settled.add if status is Status.DECIDED else self._settled.discard)(job.key)
        return results

    def release(self, key: str) -> None:
        """Free everything held for a sequence."""
        self._settled.discard(key)
        self._inner.release(key)

    def gauges(self) -> dict[str, float]:
        """The backend's, and the times of steps."""
        return {**(self._gauges() if self._gauges is not None else {}), **self._timer.report()}


class TimedDrafter(ForwardingDrafter):
    """A draft backend, and how long its steps take; see :class:`TimedTarget`. A branch's first step counts.

    What a drafter does between two steps is part of the later one's time, unless it rested there: a draft of K tokens
    takes K of both, and where cores are short what lies between is the longer.
    """

    def __init__(
        self, backend: DraftBackend, gauges: Gauges | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(backend)
        self._gauges = gauges
        self._clock = clock
        self._last_s: float | None = None
        self._timer = StepTimer()
        self._settled: set[str] = set()

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """One step, timed."""
        before_s = self._clock()
        results = self._inner.propose(jobs)
        after_s = self._clock()
        duration_s = after_s - (before_s if self._last_s is None else self._last_s)
        self._last_s = after_s
        statuses = [result.status for result in results]
        is_plain = bool(jobs) and statuses.count(Status.DECIDED) == len(jobs)
        for job, status in zip(jobs, statuses, strict=True):
            if job.fork_of is not None:
                break  # branches come last
            is_plain = is_plain and job.key in self._settled
            (self._settled.add if status is Status.DECIDED else self._settled.discard)(job.key)
        if is_plain:
            self._timer.add(len(jobs), len(jobs), duration_s)
        return results

    def rest(self) -> None:
        """A step found nothing to draft: the time until the next one is nobody's."""
        self._last_s = None
        self._inner.rest()

    def release(self, key: str) -> None:
        """Free everything held for a sequence or branch."""
        self._settled.discard(key)
        self._inner.release(key)

    def gauges(self) -> dict[str, float]:
        """The backend's, and the times of steps."""
        return {**(self._gauges() if self._gauges is not None else {}), **self._timer.report()}
