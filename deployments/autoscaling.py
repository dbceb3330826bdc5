"""How many replicas a deployment should have: pure functions over what its replicas say of their load.

Serve's controller calls :class:`Autoscaler`, which it has got by value: this module imports nothing of this project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FULL = 0.8
"""Share of their caches that targets are to use, before there are more of them."""
LATE_DRAFTS = 0.05
"""Exposed draft time from which there are more drafters."""
LATE_LOOP_S = 0.05
"""Lag of its event loop from which there are more routers, or ingresses."""
BUSY = 0.4
"""Share of their time from which drafters and loops are busy: others are of no help to those that are not."""
IDLE_SEQUENCES = 0.5
"""Fewer than this need no drafter; a controller that only looks now and then whether drafting pays has fewer."""
MEAN_DRAFT_TOKENS = 1.0
"""What a draft is taken to bring as long as none was verified."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one replica has to do.

    Attributes:
        sequences: That it holds.
        waiting: Of these, those that wait for room.
        used: Of a target the share of its cache that is in use; of others the share of their time that they are busy.
        late: Of a drafter the exposed draft time of its targets (:class:`ExposedDrafts`), of an event loop its lag in
            seconds.
    """

    sequences: float = 0.0
    waiting: float = 0.0
    used: float = 0.0
    late: float = 0.0


Report = Mapping[str, float]


def load_of(part: str, report: Report, before: Report, seconds: float) -> Load:
    """The load of a replica, by its report and the one of some seconds before.

    Args:
        part: ``ingress``, ``router``, ``target`` or ``draft``.
        report: Of its machine, and of its loop.
        before: Empty where there was none.
        seconds: Between them.
    """
    if part == "target":
        names = "num_sequences", "num_waiting_sequences", "kv_cache_usage_perc"
        return Load(*(report.get(name, 0.0) for name in names))
    if part == "draft":
        busy_s = max(0.0, report.get("busy_s", 0.0) - before.get("busy_s", 0.0)) if before else 0.0
        return Load(report.get("num_sequences", 0.0), used=busy_s / max(seconds, 1e-3))
    held = report.get("num_sessions" if part == "router" else "num_requests", 0.0)
    return Load(held, used=report.get("loop_busy_share", 0.0), late=report.get("loop_lag_s", 0.0))


class ExposedDrafts:
    """Exposed draft time: the share of its time that a target would have saved had every planned draft been there.

    A target commits C tokens, and its late rounds would have had M more from drafts that bring what drafts bring in the
    mean: M / (C + M) of its time would have been saved.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._before: Mapping[str, Report] = {}
        self._at_s = float("-inf")

    def update(self, reports: Mapping[str, Report], now_s: float, period_s: float = 1.0) -> float:
        """The share of all targets together, since the last update that was at least a period ago.

        Args:
            reports: Newest counters of each target, by its name.
            now_s: The time.
            period_s: Within it the share stays as it is.
        """
        if now_s - self._at_s < 0.9 * period_s:
            return self.share
        committed = missed = 0.0
        for name, report in reports.items():
            before = self._before.get(name)
            if before is not None:  # what a first report has counted may be of long ago
                committed += max(0.0, report["num_committed_tokens"] - before["num_committed_tokens"])
                missed += max(0.0, report["num_late_rounds"] - before["num_late_rounds"]) * _mean_draft(report)
        self._before = {name: report for name, report in reports.items() if "num_late_rounds" in report}
        self._at_s = now_s
        self.share = missed / (committed + missed) if missed else 0.0
        return self.share


def _mean_draft(report: Report) -> float:
    num_drafts = report["num_drafts"]
    return report["num_accepted_tokens"] / num_drafts if num_drafts else MEAN_DRAFT_TOKENS


def desired_replicas(part: str, loads: Sequence[Load], sequences: float | None = None) -> int:
    """How many replicas there should be for the load that there is.

    Targets: so many that their caches have room for what they hold, and for what waits. Drafters: one more while they
    are busy and drafts come late, none where nothing is drafted. Routers and ingresses: one more while their loops are
    busy and lag. Drafters and loops become one fewer where the others have the time for it.

    Args:
        part: ``ingress``, ``router``, ``target`` or ``draft``.
        loads: Of each replica that runs; at least one.
        sequences: That one replica is to hold; None for as many as it keeps up with.
    """
    held = sum(load.sequences for load in loads)
    if part == "draft" and held < IDLE_SEQUENCES:
        return 0
    if part == "target":
        needed = sum(load.used + load.waiting / max(1.0, load.sequences - load.waiting) for load in loads) / FULL
    else:
        needed = _one_more_or_fewer(loads, LATE_DRAFTS if part == "draft" else LATE_LOOP_S)
    by_count = held / sequences if sequences else 0.0
    return max(1, math.ceil(max(needed, by_count) - 1e-6))


def _one_more_or_fewer(loads: Sequence[Load], late: float) -> int:
    count, busy = len(loads), sum(load.used for load in loads)
    if busy > BUSY * count and max(load.late for load in loads) > late:
        return count + 1
    return count - 1 if busy <= BUSY * (count - 1) else count


class Autoscaler:
    """Serve's autoscaling policy for one deployment; delays and bounds are Serve's own.

    Args:
        part: Whose: ``ingress``, ``router``, ``target`` or ``draft``.
        sequences: That one replica is to hold; None for as many as it keeps up with.
    """

    def __init__(self, part: str, sequences: float | None = None) -> None:
        self._part = part
        self._sequences = sequences

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and nothing to remember.

        Args:
            context: Serve's ``AutoscalingContext``.
        """
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        figures = {name: told.get(name, {}) for name in asdict(Load())}
        if not figures["sequences"]:  # those that start have told nothing yet
            return context.target_num_replicas, {}
        loads = [
            Load(**{name: by_replica.get(replica, 0.0) for name, by_replica in figures.items()})
            for replica in context.running_replicas
        ]
        return desired_replicas(self._part, loads, self._sequences), {}
