"""From runs to a row of figures, each beside the limit computed from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.bench.compare import Comparison, Mode, Pooled
from cluster.bench.limits import alpha_of_length, in_turn, over_outcomes
from cluster.bench.measures import (
    DeviceUse,
    Run,
    acceptance_rate,
    hit_rate,
    mean,
    mean_acceptance_length,
    percentiles_s,
    token_gaps_s,
    tokens_per_round,
)

IN_TURN_POLICY = "in turn"
PLAIN_POLICY = "on a miss a plain step"


@dataclass(frozen=True, slots=True)
class Limit:
    """What the devices could give, from the second token on, if the system added nothing.

    Attributes:
        tokens_per_s: Of all streams.
        policy: What it assumes: ``in turn``, or what happens where no draft is ready.
        draft_cost: c, a draft step over a plain target step; None for the target alone.
        verify_cost: v(K), a target step over 1 + K tokens over a plain one; where the mode has plain steps too, from
            the mean of all steps and the share of rounds with a draft.
        alpha: Acceptance per draft token, from the mean acceptance length.
        hit_rate: Over outcomes, share of the rounds with branches whose outcome had a draft in time; elsewhere
            that of the rounds with a draft. Lost and late drafts lower both, and so the limit.
        num_draft_tokens: Over outcomes the best length up to the one asked for, else the mean one.
    """

    tokens_per_s: float
    policy: str
    draft_cost: float | None = None
    verify_cost: float = 1.0
    alpha: float | None = None
    hit_rate: float | None = None
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One mode on one piece of work: medians over the rounds unless said otherwise.

    Attributes:
        ratio: Throughput over that of the first mode, within rounds: least, median, most.
        over_first: The same over all rounds together, with its 95% interval.
        over_best_fixed: For ``auto``, over the best mode with a fixed draft length, or none, in the same way.
        decode_tokens_per_s: From each stream's first tokens on; what the limit is held against.
        first_s: Time to the first token.
        gap_mean_s: Mean inter-token latency, over all tokens of all streams and rounds.
        gap_percentiles_s: Its 50th, 95th and 99th percentile; see :func:`cluster.bench.measures.token_gaps_s`.
        acceptance_rate: Accepted over verified draft tokens, over all rounds.
        hit_rate: Share of rounds that verified a draft.
        step_s: Time of a step by device.
        idle_share: By device.
        outside_s_per_round: Time outside all forward passes, per target step; over HTTP, between the target's steps
            while sequences go on, and in turn with one stream less the drafting; None there with several, whose
            drafting is not told apart.
        tokens_per_round: Of one stream, from its second token on.
        load: The machine's load average.
        has_equal_texts: Whether its texts are those of the first mode, in every round.
        num_emulated_steps: Over all devices and rounds.
        num_overruns: Emulated steps whose computation did not fit.
        round_tokens_per_s: Throughput of every round.
        foreseen_in_time: Share of rounds with branches whose outcome was among those offered by then.
    """

    prompts: str
    temperature: float
    num_streams: int
    mode: str
    tokens_per_s: float
    ratio: tuple[float, float, float]
    decode_tokens_per_s: float
    first_s: float
    gap_mean_s: float | None
    gap_percentiles_s: tuple[float, ...]
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    hit_rate: float | None
    step_s: dict[str, float]
    idle_share: dict[str, float]
    outside_s_per_round: float | None
    limit: Limit | None
    load: float
    has_equal_texts: bool
    num_emulated_steps: int
    num_overruns: int
    tokens_per_round: float | None = None
    over_first: Pooled | None = None
    over_best_fixed: Pooled | None = None
    round_tokens_per_s: tuple[float, ...] = ()
    foreseen_in_time: float | None = None

    @property
    def share_of_limit(self) -> float | None:
        """Measured over possible."""
        return self.decode_tokens_per_s / self.limit.tokens_per_s if self.limit is not None else None


def summarize(comparison: Comparison) -> list[Row]:
    """A row per mode."""
    plain = next((i for i, mode in enumerate(comparison.modes) if mode.num_speculative_tokens == 0), None)
    plain_step_s = None if plain is None else _step_s(comparison.runs[plain]).get("target")
    return [_row(comparison, i, plain_step_s) for i in range(len(comparison.modes))]


def _row(comparison: Comparison, index: int, plain_step_s: float | None) -> Row:
    work, mode, runs = comparison.work, comparison.modes[index], comparison.runs[index]
    streams = [stream for run in runs for stream in run.streams]
    gaps = [gap for stream in streams for gap in token_gaps_s(stream.arrivals)]
    uses = [use for run in runs for use in run.devices.values()]
    return Row(
        prompts=work.prompts,
        temperature=work.temperature,
        num_streams=work.num_streams,
        mode=mode.name,
        tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        ratio=comparison.ratios(index),
        decode_tokens_per_s=statistics.median(run.decode_tokens_per_s for run in runs),
        first_s=statistics.median(stream.first_s for stream in streams),
        gap_mean_s=mean(gaps),
        gap_percentiles_s=percentiles_s(gaps),
        acceptance_rate=acceptance_rate(streams),
        mean_acceptance_length=mean_acceptance_length(streams),
        hit_rate=hit_rate(streams),
        step_s=_step_s(runs),
        idle_share={device: _median(use.idle_share for use in found) for device, found in _by_device(runs).items()},
        outside_s_per_round=_outside_s(mode, runs),
        limit=limit_of(mode, runs, plain_step_s),
        load=statistics.median(run.load for run in runs),
        has_equal_texts=comparison.has_equal_texts(index),
        num_emulated_steps=sum(use.num_emulated_steps for use in uses),
        num_overruns=sum(use.num_overruns for use in uses),
        tokens_per_round=tokens_per_round(streams),
        over_first=comparison.pooled(index, 0),
        over_best_fixed=_over_best_fixed(comparison, index),
        round_tokens_per_s=tuple(run.tokens_per_s for run in runs),
        foreseen_in_time=_branch_hit_rate(runs, with_late=False),
    )


def _over_best_fixed(comparison: Comparison, index: int) -> Pooled | None:
    best = comparison.best_fixed()
    is_auto = comparison.modes[index].num_speculative_tokens is None
    return comparison.pooled(index, best) if is_auto and best is not None else None


def limit_of(mode: Mode, runs: Sequence[Run], plain_step_s: float | None) -> Limit | None:
    """The limit of a mode from its own runs and a plain target step at the same number of streams.

    None where the steps' times are not known. A draft step's time is a mean over all it did; drafts are taken to be as
    long as they were on average.
    """
    num_streams = len(runs[0].streams)
    if plain_step_s is None:
        return None
    if mode.num_speculative_tokens == 0:
        return Limit(num_streams / plain_step_s, "plain steps")
    streams = [stream for run in runs for stream in run.streams]
    length, hits, steps = mean_acceptance_length(streams), hit_rate(streams), _step_s(runs)
    if length is None or hits is None or not {"target", "draft"} <= steps.keys():
        return None
    num_drafts = sum(stream.num_drafts for stream in streams)
    num_draft_tokens = max(1, round(sum(stream.num_draft_tokens for stream in streams) / num_drafts))
    alpha = alpha_of_length(min(length, num_draft_tokens + 1), num_draft_tokens)
    c, v = steps["draft"] / plain_step_s, steps["target"] / plain_step_s
    if mode.service_mode != "in_turn":  # the mean is over plain steps too, which cost 1 each
        v = 1 + (v - 1) / hits
    v = max(1.0, v)
    foreseen = _branch_hit_rate(runs, with_late=True)
    policy = PLAIN_POLICY
    if mode.service_mode == "in_turn":
        time, policy = in_turn(alpha, c, num_draft_tokens, verify_cost=v), IN_TURN_POLICY
    elif foreseen is not None and mode.num_speculative_tokens is not None:
        hits = foreseen
        lengths = range(1, mode.num_speculative_tokens + 1)
        time, num_draft_tokens = min((over_outcomes(alpha, c, k, hits, verify_cost=v), k) for k in lengths)
    else:
        time = over_outcomes(alpha, c, num_draft_tokens, hits, verify_cost=v)
    return Limit(num_streams / (plain_step_s * time), policy, c, v, alpha, hits, num_draft_tokens)


def _branch_hit_rate(runs: Sequence[Run], *, with_late: bool) -> float | None:
    """Share of rounds with branches whose outcome was among them, in time or at all; None where there were no branches.

    A limit, which takes no time for messages, goes by all.
    """
    targets = [run.devices["target"] for run in runs if "target" in run.devices]
    hits, late = sum(use.num_hits for use in targets), sum(use.num_late for use in targets)
    total = hits + late + sum(use.num_misses for use in targets)
    return (hits + late * with_late) / total if total else None


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


def _outside_s(mode: Mode, runs: Sequence[Run]) -> float | None:
    """Where steps are known by counters alone, drafting in turn is told from waiting only for one stream."""
    per_round = []
    for run in runs:
        target, draft = run.devices.get("target"), run.devices.get("draft")
        if target is None or not target.num_steps:
            continue
        if run.outside_s is not None:
            per_round.append(run.outside_s / target.num_steps)
            continue
        is_serial = mode.service_mode == "in_turn"
        if is_serial and len(run.streams) > 1:
            continue
        drafting_s = draft.busy_s / target.num_steps if draft is not None and is_serial else 0.0
        if target.gap_s is not None and target.num_gaps:
            per_round.append(max(0.0, target.gap_s / target.num_gaps - drafting_s))
        else:
            per_round.append(max(0.0, target.idle_s / target.num_steps - drafting_s))
    return statistics.median(per_round) if per_round else None


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
