"""How many replicas a deployment should have: pure functions over what its replicas say of their load.

Serve pickles :class:`Autoscaler` by value for its controller: the class and what it calls use no other module of this
project.

How a deployment that has no replicas gets one: by a call that waits for it, as Serve starts one for that at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deployments.transport.link import spawn

FULL = 0.8
"""Share of their capacity (a target's cache, an ingress's slots) above which there are more replicas."""
ROOMY = 0.6
"""The same for one replica fewer: those that stay would have no more than this share in use."""
LATE_DRAFTS = 0.05
"""Exposed draft time from which there are more drafters."""
LATE_LOOP_S = 0.05
"""Lag of its event loop from which there are more routers, or ingresses."""
LONG_QUEUE_S = 1.0
"""Queue time above which users wait: no target begins a sequence that came so long ago."""
USERS_WAIT = 0.1
"""Share of the last seconds in which users waited, from which it counts."""
BUSY = 0.4
"""Share of their time from which drafters and loops are busy: others are of no help to those that are not."""
SATURATED = 0.8
"""The same of a target: it takes steps all the time."""
IDLE_SEQUENCES = 0.5
"""Fewer than this need no drafter; a controller that only looks now and then whether drafting pays has fewer."""
MEAN_DRAFT_TOKENS = 1.0
"""What a draft is taken to bring as long as none was verified."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one replica has to do.

    Attributes:
        sequences: That it holds.
        waiting: Of a target's those that wait for room in its cache.
        used: Share of a target's cache that is in use; of an ingress's slots those taken or waited for, which may be
            more than all.
        busy: Share of its time that it is in a step, or that its event loop runs.
        late: Of a drafter the exposed draft time of its targets (:class:`ExposedDrafts`), of an event loop its lag in
            seconds.
        users_wait: 1 while users wait, else 0. At an ingress: requests wait for slots, or one was refused for want of
            room. At a target and a router: at any ingress, or a sequence's queue time is above ``LONG_QUEUE_S``.
    """

    sequences: float = 0.0
    waiting: float = 0.0
    used: float = 0.0
    busy: float = 0.0
    late: float = 0.0
    users_wait: float = 0.0


Metrics = Mapping[str, float]


def load_of(part: str, metrics: Metrics, before: Metrics, seconds: float) -> Load:
    """The load of a replica, by its metrics and those of some seconds before.

    Args:
        part: ``ingress``, ``router``, ``target`` or ``draft``.
        metrics: Of its machine, and of its loop.
        before: Empty where there was none.
        seconds: Between them.
    """

    def grown(name: str) -> float:
        return max(0.0, metrics.get(name, 0.0) - before.get(name, 0.0)) if before else 0.0

    if part in ("target", "draft"):
        busy = min(1.0, grown("busy_s") / max(seconds, 1e-3))
        if part == "draft":
            return Load(metrics.get("num_sequences", 0.0), busy=busy)
        names = "num_sequences", "num_waiting_sequences", "kv_cache_usage_perc"
        sequences, waiting, used = (metrics.get(name, 0.0) for name in names)
        return Load(sequences, waiting, used, busy)
    return Load(
        metrics.get("num_sessions" if part == "router" else "num_requests", 0.0),
        used=metrics.get("slots_used_share", 0.0),
        busy=metrics.get("loop_busy_share", 0.0),
        late=metrics.get("loop_lag_s", 0.0),
        users_wait=float(metrics.get("num_waiting_requests", 0.0) > 0 or grown("num_requests_refused") > 0),
    )


LEAST_PERIOD_S = 0.9
"""Within it the share of exposed drafts stays as it is."""


class ExposedDrafts:
    """Exposed draft time: the share of its time that a target would have saved had every planned draft been there.

    A target commits C tokens, and its late rounds would have had M more from drafts that bring what drafts bring in the
    mean: M / (C + M) of its time would have been saved.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._before: Mapping[str, Metrics] = {}
        self._at_s = float("-inf")

    def update(self, of_targets: Mapping[str, Metrics], now_s: float) -> float:
        """The share of all targets together, since the last update that was about a second ago.

        Args:
            of_targets: Newest counters of each target, by its name.
            now_s: The time.
        """
        if now_s - self._at_s < LEAST_PERIOD_S:
            return self.share
        committed = missed = 0.0
        for name, metrics in of_targets.items():
            before = self._before.get(name)
            if before is not None:  # what the first ones have counted may be of long ago
                committed += max(0.0, metrics["num_committed_tokens"] - before["num_committed_tokens"])
                missed += max(0.0, metrics["num_late_rounds"] - before["num_late_rounds"]) * _mean_draft(metrics)
        self._before = {name: metrics for name, metrics in of_targets.items() if "num_late_rounds" in metrics}
        self._at_s = now_s
        self.share = missed / (committed + missed) if missed else 0.0
        return self.share


def _mean_draft(metrics: Metrics) -> float:
    num_drafts = metrics["num_drafts"]
    return metrics["num_accepted_tokens"] / num_drafts if num_drafts else MEAN_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one reason to have replicas asks for: more where there are fewer than ``least``, fewer above ``most``."""

    least: float
    most: float

    @classmethod
    def of(cls, needed: float, full: float = FULL, roomy: float = ROOMY) -> Bounds:
        """For so many whole capacities, of which each replica has one.

        Between the two bounds nothing changes, so that a load that stays as it is never starts and stops a replica in
        turn.
        """
        return cls(math.ceil(needed / full - 1e-6), math.ceil(needed / roomy - 1e-6))


def desired_replicas(
    part: str,
    loads: Sequence[Load],
    sequences: float | None = None,
    limit: float = math.inf,
    num_wanted: int | None = None,
) -> tuple[int, float]:
    """How many replicas there should be for the load that there is.

    Targets: so many that their caches have room for what they hold, and for what waits; one more while users wait and
    targets are saturated. Ingresses: so many that there are slots for all; one more while requests wait or are refused.
    Routers and ingresses: one more while their loops are busy and lag, or users wait. Drafters: one more while they are
    busy and drafts come late, none where nothing is drafted. There is one fewer where those that stay have the room and
    the time, and hold fewer sequences than those did at which users waited.

    Args:
        part: ``ingress``, ``router``, ``target`` or ``draft``.
        loads: Of each replica that runs; at least one.
        sequences: That one replica is to hold; None for as many as it keeps up with.
        limit: Sequences of one replica at which users were last seen to wait, as this gave it the last time.
        num_wanted: Replicas that there are to be by now, those that still start among them; None for those that run.

    Returns:
        The number, and the limit to give the next time.
    """
    count = len(loads)
    held = sum(load.sequences for load in loads)
    if part == "draft" and held < IDLE_SEQUENCES:
        return 0, limit
    reasons: list[Bounds] = []
    if part == "target":
        reasons.append(
            Bounds.of(sum(load.used + load.waiting / max(1.0, load.sequences - load.waiting) for load in loads))
        )
    else:
        reasons.append(_by_time(part, loads))
    if part == "ingress":
        reasons.append(Bounds.of(sum(load.used for load in loads)))
    if sequences:
        reasons.append(Bounds.of(held / sequences, 1.0, ROOMY / FULL))
    if part != "draft":
        per_replica = max(1.0, held / count)
        if _users_wait_for(part, loads):
            limit = min(limit, per_replica)
            reasons.append(Bounds(count + 1, count + 1))
        else:
            limit = max(limit, per_replica)
            reasons.append(Bounds.of(held / limit, math.inf, ROOMY / FULL))
    least, most = max(bounds.least for bounds in reasons), max(bounds.most for bounds in reasons)
    now = count if num_wanted is None else num_wanted
    return int(max(1, least if least > now else min(now, most))), limit


def _by_time(part: str, loads: Sequence[Load]) -> Bounds:
    """Of drafters and loops, by their time."""
    count, busy = len(loads), sum(load.busy for load in loads)
    late = max(load.late for load in loads) > (LATE_DRAFTS if part == "draft" else LATE_LOOP_S)
    is_busy = busy > BUSY * count
    return Bounds(count + 1 if is_busy and late else 0, count - 1 if busy <= BUSY * (count - 1) else count)


def _users_wait_for(part: str, loads: Sequence[Load]) -> bool:
    """Whether users wait, and more replicas of this part may change that."""
    if max(load.users_wait for load in loads) < USERS_WAIT:
        return False
    busy = sum(load.busy for load in loads) / len(loads)
    return part == "ingress" or busy > (SATURATED if part == "target" else BUSY)


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
        """How many replicas there should be, and what to remember until the next call.

        Args:
            context: Serve's ``AutoscalingContext``.
        """
        reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        state = dict(context.policy_state or {})
        metrics = {name: reported.get(name, {}) for name in asdict(Load())}
        if not metrics["sequences"]:  # those that start have reported nothing yet
            return context.target_num_replicas, state
        loads = [
            Load(**{name: by_replica.get(replica, 0.0) for name, by_replica in metrics.items()})
            for replica in context.running_replicas
        ]
        limit = state.get("limit", math.inf)
        number, limit = desired_replicas(self._part, loads, self._sequences, limit, context.target_num_replicas)
        return number, {"limit": limit}


logger = logging.getLogger("ray.serve")

PERIOD_S = 1.0
"""How often somebody looks whether a replica is wanted; what is wanted at two looks in a row is called for."""
PATIENCE_S = 10.0
"""For how long a call waits before it is looked again."""


class Waker:
    """Calls for a replica while one is wanted; on the event loop.

    Args:
        is_wanted: Whether there is none, and there should be one.
        call: Calls a method of the deployment, without doing anything; gives Serve's response.
    """

    def __init__(self, is_wanted: Callable[[], bool], call: Callable[[], Any]) -> None:
        self._is_wanted = is_wanted
        self._call = call
        self._task = spawn(self._run())

    def close(self) -> None:
        """Call no more."""
        self._task.cancel()

    async def _run(self) -> None:
        was_wanted = False
        while True:
            await asyncio.sleep(PERIOD_S)
            is_wanted = self._is_wanted()
            if is_wanted and was_wanted:
                await self._wake()
            was_wanted = is_wanted

    async def _wake(self) -> None:
        response: Any = None
        try:
            response = self._call()
            async with asyncio.timeout(PATIENCE_S):
                await response
        except Exception as error:  # nobody came yet, or the deployment is not there
            logger.debug("No replica has answered yet: %r", error)
        finally:
            if response is not None:
                response.cancel()
