"""The service's metrics page: what this ingress counted, and what the workers last reported."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specdec.protocol.plans import WorkerKind

logger = logging.getLogger("ray.serve")

_PATIENCE_S = 2.0
Reports = dict[str, tuple[WorkerKind | Literal["router"], dict[str, float]]]


async def metrics_page(registry: CollectorRegistry, router: Any, model_name: str) -> bytes:
    """The page in Prometheus' text format.

    Args:
        registry: Of this ingress.
        router: Handle of the routers, which know the workers' newest reports.
        model_name: Label of every sample.
    """
    own: bytes = generate_latest(registry)
    reports: Reports = {}
    try:
        for answer in await asyncio.wait_for(router.broadcast("reports").results_async(), _PATIENCE_S):
            reports.update(answer)
    except Exception as error:  # a router that dies or hangs must not cost this ingress' own counters
        logger.warning("The workers' figures are missing from this scrape: %r", error)
    workers = CollectorRegistry()
    workers.register(WorkerReports(reports, model_name))
    theirs: bytes = generate_latest(workers)
    return own + theirs


class WorkerReports(Collector):
    """What workers report, and what the routers' controllers choose and estimate, as gauges labelled by worker."""

    def __init__(self, reports: Reports, model_name: str) -> None:
        self._reports = reports
        self._model_name = model_name

    def collect(self) -> list[GaugeMetricFamily]:
        """One family per figure."""
        labels = ["model_name", "role", "worker"]
        families: dict[str, GaugeMetricFamily] = {}
        for name, text in _GAUGES.items():
            families[name] = GaugeMetricFamily(f"specdec_{name}", text, labels=labels)
        for worker, (kind, report) in sorted(self._reports.items()):
            for name, family in families.items():
                if name in report:
                    family.add_metric([self._model_name, kind, worker], report[name])
        fallbacks = "Sequences that ran without speculation since the worker started, by reason."
        planned = "Sequences that the controller has planned for, by way of speculating."
        return [
            *families.values(),
            self._by_part("planned_sequences", planned, [*labels, "mode"]),
            self._by_part("num_fallbacks", fallbacks, [*labels, "reason"]),
        ]

    def _by_part(self, name: str, text: str, labels: list[str]) -> GaugeMetricFamily:
        """One family for all figures called ``name/part``, with the part as its last label."""
        family = GaugeMetricFamily(f"specdec_{name}", text, labels=labels)
        for worker, (role, report) in sorted(self._reports.items()):
            for figure, value in report.items():
                if figure.startswith(f"{name}/"):
                    family.add_metric([self._model_name, role, worker, figure.partition("/")[2]], value)
        return family


_GAUGES = {
    "num_sequences": "Sequences that a worker holds.",
    "num_solo_sequences": "Of these, requests for the draft model itself, which nobody drafts for.",
    "kv_cache_usage_perc": "Share of a worker's cache blocks that sequences hold, from 0 to 1.",
    "kv_blocks_in_use": "Cache blocks that sequences hold.",
    "kv_blocks_reusable": "Cache blocks kept only for prompts that begin alike; not among those in use.",
    "num_state_slots": "Recurrent states that a worker has room for; 0 where its model has none.",
    "state_slots_in_use": "Recurrent states that sequences and branches hold.",
    "state_slots_reusable": "Recurrent states kept only for prompts that begin alike; not among those in use.",
    "num_evictions": "Times a sequence or branch lost its cache to another since the worker started; it is read again.",
    "num_reused_tokens": "Tokens found in the cache where a sequence began, since the worker started.",
    "num_reread_tokens": "Tokens read again because a recurrent state did not reach back so far.",
    "num_steps": "Steps of a worker since it started.",
    "busy_s": "Seconds that a worker's steps took since it started.",
    "gap_s": "Seconds between steps of which the later goes on with a sequence of the earlier, since the start.",
    "num_gaps": "Steps that go on with a sequence of the step before.",
    "report_s": "The worker's own clock when it reported, in seconds.",
    "num_branch_hits": "Rounds whose outcome was among those offered with branches when the next draft was chosen.",
    "num_branch_late": "Rounds whose outcome was among those offered with branches, but only later.",
    "num_branch_misses": "Rounds for which branches were offered, and none of them for the outcome.",
    "num_offers": "Offers that a drafter sent, or a target received, since it started.",
    "num_stale_offers": "Offers that the target dropped before anything of them was verified.",
    "num_late_offers": "Offers that came when the round after the one that they foresaw had been decided as well.",
    "num_branches_held": "Branches that the drafter holds now.",
    "num_branches_forked": "Branches that the drafter began since it started.",
    "num_right_tokens": "Draft tokens that were decided as drafted, verified or not, under the coupled rule.",
    "num_wrong_tokens": "Draft tokens in whose place another was decided, verified or not, under the coupled rule.",
    "num_promoted": "Branches that became the chain, because their outcome came.",
    "num_branch_tokens_wasted": "Draft tokens of branches whose outcome did not come.",
    "num_waiting_sequences": "Sequences for which the drafter's last step had no room in its cache.",
    "num_emulated_steps": "Steps that ended at an emulated time.",
    "num_overruns": "Emulated steps that took longer to compute than the emulated time.",
    "is_scripted": "1 where tokens come from a script.",
    "planned_draft_tokens": "Draft tokens per round that the controller plans, mean over the sequences that draft.",
    "planned_branches": "Outcomes to prepare per sequence that the controller plans, mean over those that draft.",
    "planned_draft_wait_seconds": "Longest wait of a row for its draft that the controller plans, mean over the same.",
    "planned_arm_draft_tokens": "Draft tokens per round that the controller has chosen for this target; 0 is off.",
    "estimated_acceptance_rate": "Acceptance rate per draft token, over all sequences of late.",
    "estimated_guess_rate": "How often one of three guesses is right where the draft's own token is not.",
    "estimated_target_step_seconds": "A step of this target with one token per sequence.",
    "estimated_verify_step_seconds": "A step of this target that verifies a whole draft per sequence.",
    "estimated_draft_step_seconds": "A step of the drafter with the branches that are planned.",
    "estimated_round_trip_seconds": "From a verdict to an offer made of it, drafting left out.",
}
