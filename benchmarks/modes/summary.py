"""From runs to a row of figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.modes.compare import Comparison, Pooled
from benchmarks.modes.measures import (
    DeviceUse,
    Run,
    mean,
    percentiles_s,
    token_gaps_s,
    tokens_per_round,
)
from specdec.engine.results import SpecStats


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One variant on one piece of work: medians over the rounds unless said otherwise.

    Attributes:
        ratio: Throughput over that of the first variant, within rounds: least, median, most.
        over_first: The same over all rounds together, with its 95% interval.
        over_best_fixed: For ``auto``, over the best variant with a fixed draft length, or none, in the same way.
        decode_tokens_per_s: From each stream's first tokens on.
        first_s: Time to the first token.
        gap_mean_s: Mean inter-token latency, over all tokens of all streams and rounds.
        gap_percentiles_s: Its 50th, 95th and 99th percentile; see :func:`benchmarks.modes.measures.token_gaps_s`.
        acceptance_rate: Accepted over verified draft tokens, over all rounds.
        step_s: Time of a step by device.
        idle_share: By device.
        tokens_per_round: Of one stream, from its second token on.
        load: The machine's load average.
        has_equal_texts: Whether its texts are those of the first variant, in every round.
        num_emulated_steps: Over all devices and rounds.
        num_overruns: Emulated steps whose computation did not fit.
        round_tokens_per_s: Throughput of every round.
    """

    prompts: str
    temperature: float
    num_streams: int
    variant: str
    tokens_per_s: float
    ratio: tuple[float, float, float]
    decode_tokens_per_s: float
    first_s: float
    gap_mean_s: float | None
    gap_percentiles_s: tuple[float, ...]
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    step_s: dict[str, float]
    idle_share: dict[str, float]
    load: float
    has_equal_texts: bool
    num_emulated_steps: int
    num_overruns: int
    tokens_per_round: float | None = None
    over_first: Pooled | None = None
    over_best_fixed: Pooled | None = None
    round_tokens_per_s: tuple[float, ...] = ()


def summarize(comparison: Comparison) -> list[SummaryRow]:
    """A row per variant."""
    return [_row(comparison, i) for i in range(len(comparison.variants))]


def _row(comparison: Comparison, index: int) -> SummaryRow:
    work, variant, runs = comparison.work, comparison.variants[index], comparison.runs[index]
    streams = [stream for run in runs for stream in run.streams]
    stats = sum((stream.stats for stream in streams), SpecStats())
    gaps = [gap for stream in streams for gap in token_gaps_s(stream.arrivals)]
    uses = [use for run in runs for use in run.devices.values()]
    return SummaryRow(
        prompts=work.prompts,
        temperature=work.temperature,
        num_streams=work.num_streams,
        variant=variant.name,
        tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        ratio=comparison.ratios(index),
        decode_tokens_per_s=statistics.median(run.decode_tokens_per_s for run in runs),
        first_s=statistics.median(stream.first_s for stream in streams),
        gap_mean_s=mean(gaps),
        gap_percentiles_s=percentiles_s(gaps),
        acceptance_rate=stats.acceptance_rate if stats.num_drafts else None,
        mean_acceptance_length=stats.mean_acceptance_length if stats.num_drafts else None,
        step_s=_step_s(runs),
        idle_share={device: _median(use.idle_share for use in found) for device, found in _by_device(runs).items()},
        load=statistics.median(run.load for run in runs),
        has_equal_texts=comparison.has_equal_texts(index),
        num_emulated_steps=sum(use.num_emulated_steps for use in uses),
        num_overruns=sum(use.num_overruns for use in uses),
        tokens_per_round=tokens_per_round(streams),
        over_first=comparison.pooled(index, 0),
        over_best_fixed=_over_best_fixed(comparison, index),
        round_tokens_per_s=tuple(run.tokens_per_s for run in runs),
    )


def _over_best_fixed(comparison: Comparison, index: int) -> Pooled | None:
    best = comparison.best_fixed()
    is_auto = comparison.variants[index].num_speculative_tokens is None
    return comparison.pooled(index, best) if is_auto and best is not None else None


def _by_device(runs: Iterable[Run]) -> dict[str, list[DeviceUse]]:
    found: dict[str, list[DeviceUse]] = {}
    for run in runs:
        for device, use in run.devices.items():
            found.setdefault(device, []).append(use)
    return found


def _step_s(runs: Sequence[Run]) -> dict[str, float]:
    """Median over the rounds, by device."""
    times = {device: [use.step_s for use in uses if use.step_s] for device, uses in _by_device(runs).items()}
    return {device: statistics.median(found) for device, found in times.items() if found}


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
