"""Steps one by one: backends that note when each began and ended, and step times as functions of batch and tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
from specdec.protocol.marks import TokenLog
from specdec.sampling.params import SamplingParams, SequenceSpec

_MAX_PREFILL_STEPS = 10_000


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


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step at one batch.

    Attributes:
        device: ``target`` or ``draft``.
        num_rows: Sequences in the batch.
        num_draft_tokens: Draft tokens verified in each row; 0 on a drafter.
        median_s: Over the repeats.
        worst_s: The longest of them.
    """

    device: str
    num_rows: int
    num_draft_tokens: int
    median_s: float
    worst_s: float


def verify_cost(times: Sequence[StepTime], num_rows: int, num_draft_tokens: int) -> float | None:
    """v(K): a target step over 1 + K tokens a row, over one of 1 token a row; None where either was not measured."""
    by_length = {t.num_draft_tokens: t.median_s for t in times if t.device == "target" and t.num_rows == num_rows}
    if 0 not in by_length or num_draft_tokens not in by_length:
        return None
    return by_length[num_draft_tokens] / by_length[0]


def measure_steps(
    target: TargetBackend,
    drafter: DraftBackend | None,
    *,
    batches: Sequence[int],
    draft_lengths: Sequence[int],
    context: int,
    repeats: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[StepTime]:
    """Time steps of both models over batches of equal rows that have ``context`` tokens behind them.

    Args:
        target: Decides; its draft tokens are arbitrary, as a verification costs the same whatever is kept.
        drafter: Proposes; None where there is none.
        batches: Numbers of rows.
        draft_lengths: Draft tokens a row; 0 is a plain step.
        context: Tokens of each row before the step.
        repeats: Of every step; each length has its turn in each round of repeats.
        clock: Seconds.
    """
    times: list[StepTime] = []
    for num_rows in batches:
        logs = [TokenLog([3 + (7 * row + i) % 11 for i in range(context)]) for row in range(num_rows)]
        spec = SequenceSpec(SamplingParams(temperature=0, ignore_eos=True), 0, context, target.max_model_len)
        keys = [f"step-{num_rows}-{row}" for row in range(num_rows)]
        _read(target, drafter, keys, logs, spec)
        spent: dict[int, list[float]] = {length: [] for length in draft_lengths}
        drafting: list[float] = []
        for number in range(repeats):
            for length in draft_lengths:
                draft = tuple(3 + (number + i) % 11 for i in range(length))
                jobs = [VerifyJob(key, log, draft, spec) for key, log in zip(keys, logs, strict=True)]
                spent[length].append(_timed(partial(target.verify, jobs), clock))
            if drafter is not None:
                asked = [DraftJob(k, log.tokens, spec, context, context) for k, log in zip(keys, logs, strict=True)]
                drafting.append(_timed(partial(drafter.propose, asked), clock))
        times += [_summary("target", num_rows, length, durations) for length, durations in spent.items()]
        if drafting:
            times.append(_summary("draft", num_rows, 0, drafting))
        for key in keys:
            target.release(key)
            if drafter is not None:
                drafter.release(key)
    return times


def _summary(device: str, num_rows: int, num_draft_tokens: int, durations: Sequence[float]) -> StepTime:
    return StepTime(device, num_rows, num_draft_tokens, statistics.median(durations), max(durations))


def _read(
    target: TargetBackend,
    drafter: DraftBackend | None,
    keys: Sequence[str],
    logs: Sequence[TokenLog],
    spec: SequenceSpec,
) -> None:
    """Have both models read all rows' tokens."""
    verifying = [VerifyJob(key, log, (), spec) for key, log in zip(keys, logs, strict=True)]
    proposing = [DraftJob(key, log.tokens, spec, 0, len(log)) for key, log in zip(keys, logs, strict=True)]
    for _ in range(_MAX_PREFILL_STEPS):
        if all(result.status is Status.DECIDED for result in target.verify(verifying)):
            break
    else:
        raise RuntimeError(f"{len(keys)} rows of {len(logs[0])} tokens do not fit the target's cache at once")
    for _ in range(_MAX_PREFILL_STEPS if drafter is not None else 0):
        assert drafter is not None
        if all(proposal.status is Status.DECIDED for proposal in drafter.propose(proposing)):
            break


def _timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started_s = clock()
    work()
    return clock() - started_s
