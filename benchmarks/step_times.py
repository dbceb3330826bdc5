"""Times of a pair's steps by batch and draft length; of the project it needs the engine alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from specdec.core.backends import DraftBackend, DraftJob, Status, TargetBackend, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec

_MAX_PREFILL_STEPS = 10_000


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


def step_table(steps: Sequence[StepTime]) -> list[str]:
    """Lines of a Markdown table, with v(K) beside each verification."""
    lines = ["| device | rows | draft tokens a row | median ms | worst ms | v(K) |", "|---|---|---|---|---|---|"]
    for step in steps:
        v = verify_cost(steps, step.num_rows, step.num_draft_tokens) if step.device == "target" else None
        length = str(step.num_draft_tokens) if step.device == "target" else "-"
        times = f"{1e3 * step.median_s:.2f} | {1e3 * step.worst_s:.2f}"
        lines.append(f"| {step.device} | {step.num_rows} | {length} | {times} | {'-' if v is None else f'{v:.2f}'} |")
    return lines
