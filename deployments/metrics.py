"""The service's metrics page: what the ingresses counted, what workers report, and what routers choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from specdec.protocol.plans import WorkerKind

Reports = dict[str, tuple[WorkerKind | Literal["router", "ingress"], dict[str, float]]]
"""What one router tells: its workers' newest reports by their names, and its own choices under its own. What ingresses
have counted has the same form."""
_LABELS = ["model_name", "role", "worker"]


class IngressPage(NamedTuple):
    """What one replica of the ingress has counted, in Prometheus' text format."""

    replica: str
    text: bytes


def metrics_page(
    pages: Sequence[IngressPage], routers: Sequence[Reports], model_name: str, failures: Mapping[str, int]
) -> bytes:
    """The page in Prometheus' text format.

    Every sample tells whose it is by the labels ``role`` and ``worker``, so that sums over replicas add up, and a
    replica that starts again from 0 is a counter's reset and nothing else.

    Args:
        pages: Of the ingresses that answered.
        routers: What the routers that answered tell.
        model_name: Label of every sample.
        failures: Times that a replica did not answer, by deployment.
    """
    registry = CollectorRegistry()
    registry.register(IngressPages(pages))
    registry.register(WorkerReports(routers, model_name))
    registry.register(_Failures(failures))
    text: bytes = generate_latest(registry)
    return text


class IngressPages(Collector):
    """The ingresses' own families, one sample per replica."""

    def __init__(self, pages: Sequence[IngressPage]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        """Each family once, with the samples of all replicas."""
        families: dict[str, Metric] = {}
        for replica, text in self._pages:
            whose = {"role": "ingress", "worker": replica}
            for family in text_string_to_metric_families(text.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, sample.labels | whose, sample.value)
        return families.values()


class _Failures(Collector):
    def __init__(self, failures: Mapping[str, int]) -> None:
        self._failures = failures

    def collect(self) -> Iterable[Metric]:
        """One counter."""
        text = "Times that a replica did not answer when its figures were asked for."
        family = CounterMetricFamily("specdec_scrape_failures", text, labels=["role"])
        for role, count in self._failures.items():
            family.add_metric([role], count)
        return [family]


class WorkerReports(Collector):
    """What workers report, and what the routers' controllers choose and estimate.

    Args:
        routers: What each router tells.
        model_name: Label of every sample.
    """

    def __init__(self, routers: Sequence[Reports], model_name: str) -> None:
        self._routers = routers
        self._model_name = model_name
        self._newest: Reports = {}
        for reports in routers:
            for name, (kind, report) in reports.items():
                held = self._newest.get(name)
                if held is None or report.get("report_s", 0.0) > held[1].get("report_s", 0.0):
                    self._newest[name] = (kind, report)

    def collect(self) -> Iterator[Metric]:
        """One family per figure."""
        for name, text in _GAUGES.items():
            yield self._of_workers(GaugeMetricFamily(f"specdec_{name}", text, labels=_LABELS), name)
        for name, text in _COUNTERS.items():
            yield self._of_workers(CounterMetricFamily(f"specdec_{name}", text, labels=_LABELS), name)
        for name, text in _COUNTERS_BY_REASON.items():
            counter = CounterMetricFamily(f"specdec_{name}", text, labels=[*_LABELS, "reason"])
            yield self._by_part(counter, name, [self._newest])
        for name, text in _CHOICES.items():
            yield self._of_routers(GaugeMetricFamily(f"specdec_{name}", text, labels=[*_LABELS, "router"]), name)
        planned = GaugeMetricFamily(
            "specdec_planned_sequences",
            "Sequences that the controller has planned for, by way of speculating.",
            labels=[*_LABELS, "mode"],
        )
        yield self._by_part(planned, "planned_sequences", self._routers)

    def _of_workers(self, family: CounterMetricFamily | GaugeMetricFamily, name: str) -> Metric:
        for worker, (kind, report) in sorted(self._newest.items()):
            if name in report:
                family.add_metric([self._model_name, kind, worker], report[name])
        return family

    def _of_routers(self, family: GaugeMetricFamily, name: str) -> Metric:
        """Each router has a controller of its own, with estimates of its own."""
        for reports in self._routers:
            router = next((name for name, (kind, _) in reports.items() if kind == "router"), "")
            for worker, (kind, report) in sorted(reports.items()):
                if name in report:
                    family.add_metric([self._model_name, kind, worker, router], report[name])
        return family

    def _by_part(
        self, family: CounterMetricFamily | GaugeMetricFamily, name: str, all_reports: Sequence[Reports]
    ) -> Metric:
        """All figures called ``name/part``, with the part as the last label."""
        for reports in all_reports:
            for worker, (role, report) in sorted(reports.items()):
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
    "report_s": "The worker's own clock when it reported, in seconds.",
    "num_branches_held": "Branches that the drafter holds now.",
    "num_waiting_sequences": "Sequences for which the drafter's last step had no room in its cache.",
    "has_failed_controller": "1 where a router's controller has failed, so that nothing is drafted.",
    "is_scripted": "1 where tokens come from a script.",
    "is_draining": "1 where no sequences are taken any more.",
}
"""What a worker has now."""

_COUNTERS = {
    "num_evictions": "Times a sequence or branch lost its cache to another; it is read again.",
    "num_reused_tokens": "Tokens found in the cache where a sequence began.",
    "num_reread_tokens": "Tokens read again because a recurrent state did not reach back so far.",
    "num_steps": "Steps of a worker.",
    "busy_s": "Seconds that a worker's steps took.",
    "gap_s": "Seconds between steps of which the later goes on with a sequence of the earlier.",
    "num_gaps": "Steps that go on with a sequence of the step before.",
    "num_branch_hits": "Rounds whose outcome was among those offered with branches when the next draft was chosen.",
    "num_branch_misses": "Rounds for which branches were offered, and none of them for the outcome.",
    "num_failed_steps": "Steps that failed as a whole; the sequences in them were tried again apart from others.",
    "num_suspects": "Sequences that were put apart because a step or a worker with them had failed.",
    "num_config_errors": "Configurations (user_config) that a replica refused while it served; the one before holds.",
    "num_errors": "Sequences that a worker ended with an error.",
    "num_sequence_errors": "Sequences that ended with an error, wherever it arose, as a router or an ingress saw it.",
    "num_resubmitted": "Times that an ingress submitted a sequence again, as a router was gone, silent or refused it.",
    "num_reopened": "Times that a router opened a sequence again on a worker.",
    "num_handed_over": "Sequences that a router took from a worker that drains.",
    "num_refused_model": "Sequences that a router refused because they are of another model.",
    "num_refused_draining": "Sequences that a router or an ingress refused because it drains.",
    "num_dropped_messages": "Messages of an incarnation that is over, dropped by a router or an ingress.",
    "num_skipped_sequences": "Sequences for which the drafter drafts no more because they had failed there.",
    "num_offers": "Offers that a drafter sent, or a target received.",
    "num_stale_offers": "Offers that the target dropped before anything of them was verified.",
    "num_branches_forked": "Branches that the drafter began.",
    "num_right_tokens": "Draft tokens that were decided as drafted, verified or not, under the coupled rule.",
    "num_wrong_tokens": "Draft tokens in whose place another was decided, verified or not, under the coupled rule.",
    "num_promoted": "Branches that became the chain, because their outcome came.",
    "num_branch_tokens_wasted": "Draft tokens of branches whose outcome did not come.",
    "num_emulated_steps": "Steps that ended at an emulated time.",
    "num_overruns": "Emulated steps that took longer to compute than the emulated time.",
}
"""What a worker has counted since it started."""

_COUNTERS_BY_REASON = {
    "num_fallbacks": "Sequences that ran without speculation, by reason.",
    "num_resyncs": "Times that a worker asked a router to open a sequence again, by reason.",
    "num_refused": "Sequences that a worker refused, by reason.",
}

_CHOICES = {
    "planned_draft_tokens": "Draft tokens per round that the controller plans, for a target as chosen, 0 is off.",
    "planned_branches": "Outcomes to prepare per sequence that the controller plans, mean over those that draft.",
    "estimated_acceptance_rate": "Acceptance rate per draft token, over all sequences of late.",
    "estimated_guess_rate": "How often the draft's next guess is right where its token and others before were not.",
    "estimated_target_step_seconds": "A step of this target with one token per sequence.",
    "estimated_verify_step_seconds": "A step of this target that verifies a whole draft per sequence.",
    "estimated_draft_step_seconds": "A step of the drafter with the branches that are planned.",
    "estimated_round_trip_seconds": "From a verdict to an offer made of it, drafting left out.",
}
"""What a router's controller chooses and estimates, of itself or of a target."""
