"""Recording rules and alerts, as Prometheus reads them.

Whatever is compared here is summed over the replicas of one service: series of one namespace, Ray cluster, application
and model. Namespace and cluster are what a Prometheus on Kubernetes adds; elsewhere the rules are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from deployments.metrics.families import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN, Family


class Slo(NamedTuple):
    """A time that most sequences should keep to."""

    name: str
    words: str
    section: str
    family: Family
    most_s: float


SLOS: tuple[Slo, ...] = (
    Slo("ttft", "Time to first token", "first-tokens-are-slow", TIME_TO_FIRST_TOKEN, 2.5),
    Slo("itl", "Inter-token latency", "the-next-tokens-are-slow", INTER_TOKEN_LATENCY, 0.2),
)
"""The seconds are one of the histogram's bounds; the section is one of the page below."""
PAGE = "docs/troubleshoot.md"
"""Has a section for each alert."""
SLO_SHARE = 0.99
"""So much of all observations should be within that time; the rest is the budget."""
LEAST_RATE = 0.05
"""Observations a second, below which no budget is said to burn: at night one long prompt is no outage."""
WINDOWS = ("5m", "30m", "1h", "6h")

Severity = Literal["critical", "warning"]
Rule = dict[str, Any]

BURNS: tuple[tuple[str, float, str, str, str, Severity], ...] = (
    ("Fast", 14.4, "5m", "1h", "2m", "critical"),  # 2 % of the budget of 30 days in an hour
    ("Slow", 6.0, "30m", "6h", "15m", "warning"),  # 5 % of it in 6 hours
)
"""Name; times too fast that the budget goes, over both windows; how long it must be so; severity."""

SERVICE = "by (namespace, ray_io_cluster, application)"
BY_KIND = "by (namespace, ray_io_cluster, application, kind)"
MODEL = "by (namespace, ray_io_cluster, application, model_name)"
SERVICE_ANYWHERE = "by (namespace, application)"
ON_MODEL = "on (namespace, ray_io_cluster, application, model_name)"
ON_SERVICE = "on (namespace, ray_io_cluster, application)"


def recording_rules() -> Iterator[Rule]:
    """What alerts and dashboards ask for over and over."""
    accepted, drafted = (
        f"sum {MODEL} (rate(specdec_spec_decode_num_{name}_tokens_total[5m]))" for name in ("accepted", "draft")
    )
    yield _record("specdec:draft_tokens:rate5m", drafted)
    yield _record("specdec:acceptance:ratio_rate5m", f"{accepted} / ({drafted} > 0)")
    for name, _, _, family, most_s in SLOS:
        for window in WINDOWS:
            within = f'sum {MODEL} (rate({family.series}_bucket{{le="{most_s}"}}[{window}]))'
            count = f"sum {MODEL} (rate({family.series}_count[{window}]))"
            yield _record(slow_ratio(name, window), f"1 - {within} / ({count} > 0)")


def slow_ratio(name: str, window: str) -> str:
    """The recorded share of observations that exceed their time limit."""
    return f"specdec:{name}_slow:ratio_rate{window}"


def alerts() -> Iterator[Rule]:
    """What somebody should look at, each with the first thing to do."""
    yield from _missing_parts()
    yield from _speculation()
    yield from _load()
    yield from _faults()
    yield from _updates()


def _missing_parts() -> Iterator[Rule]:
    yield _alert(
        "SpecdecMetricsMissing",
        "absent(specdec_router_workers)",
        "5m",
        "critical",
        "No router of any service reports: all of them are down, or nothing scrapes them",
        "Check that Prometheus lists the PodMonitor's targets, and that the RayService's pods run.",
        "metrics-are-missing",
    )
    # An upgrade makes another Ray cluster of the same service, so that the cluster is no part of what is missed.
    largest = f"max {SERVICE_ANYWHERE}"
    yield _alert(
        "SpecdecServiceMissing",
        f"{largest} (present_over_time(specdec_router_workers[1d])) unless {largest} (specdec_router_workers)",
        "5m",
        "critical",
        "A service whose routers reported within the last day reports no more",
        "Check that the RayService's pods run and are scraped; silence the alert if the service was deleted.",
        "metrics-are-missing",
    )
    by_kind = f"max {BY_KIND}"
    yield _alert(
        "SpecdecWorkersMissing",
        f"{by_kind} (specdec_router_workers) < {by_kind} (specdec_min_workers)",
        "15m",
        "warning",
        "Routers reach fewer workers of a kind than the configuration's minimum",
        "Find the replica that does not come up in Serve's status, and read the end of its log.",
        "a-replica-does-not-come-up",
    )
    yield _alert(
        "SpecdecTargetDown",
        f'max {SERVICE} (specdec_router_workers{{kind="target"}}) == 0',
        "1m",
        "critical",
        "No router reaches a target: requests wait until limits.queue_timeout_s, then get 503",
        "Read the end of the TargetServer replicas' logs; out of memory and unreadable files are the usual causes.",
        "a-target-hangs-or-dies",
    )
    yield _alert(
        "SpecdecDraftDown",
        f'max {SERVICE} (specdec_router_workers{{kind="drafter"}}) == 0 and {ON_SERVICE}'
        f' (max {SERVICE} (specdec_min_workers{{kind="drafter"}}) > 0'
        f" or sum {SERVICE} (specdec_sequences_without_drafter) > 0)",
        "1m",
        "warning",
        "No router reaches a drafter: answers are the same, but slower",
        "Read the end of the DraftServer replicas' logs; the target goes on without drafts meanwhile.",
        "nothing-is-drafted",
    )


def _speculation() -> Iterator[Rule]:
    acceptance = "specdec:acceptance:ratio_rate5m"
    yield _alert(
        "SpecdecAcceptanceCollapse",
        f"{acceptance} < 0.5 * avg_over_time({acceptance}[1d]) and {ON_MODEL} specdec:draft_tokens:rate5m > 1",
        "10m",
        "warning",
        "Less than half as many draft tokens are accepted as over the last day",
        "Compare the revisions of target and draft with yesterday's; then look for other prompts or temperatures.",
        "speculation-does-not-pay",
    )
    gain = f"max {SERVICE} (avg_over_time(specdec_measured_gain[30m])) < 1.05"
    busy = f"sum {SERVICE} (avg_over_time(specdec_planned_sequences[30m])) > 0.5"
    yield _alert(
        "SpecdecSpeculationNotPaying",
        f"({gain} and {ON_SERVICE} {busy}) or max {SERVICE} (specdec_controller_failed) == 1",
        "15m",
        "warning",
        "Speculation gains less than 5% over plain decoding, or its controller has failed",
        "Search the routers' logs for 'controller failed'; else use a faster draft, or none.",
        "speculation-does-not-pay",
    )


def _load() -> Iterator[Rule]:
    yield _alert(
        "SpecdecKvCacheNearlyFull",
        "max by (namespace, ray_io_cluster, application, deployment, replica) (specdec_kv_cache_usage_perc) > 0.95",
        "10m",
        "warning",
        "Sequences hold over 95% of a worker's cache blocks: others wait or are preempted",
        "Add replicas, raise kv_cache_memory, or lower limits.max_total_tokens.",
        "memory-is-full",
    )
    buckets = f"sum by (namespace, ray_io_cluster, application, le) {_rate('request_queue_time_seconds_bucket')}"
    waited = f"histogram_quantile(0.9, {buckets})"
    begun = f"sum {SERVICE} {_rate('request_queue_time_seconds_count')}"
    yield _alert(
        "SpecdecWaitingTooLong",
        f"{waited} > 5 or (sum {SERVICE} (specdec_num_requests_waiting) > 0 unless {ON_SERVICE} {begun} > 0)",
        "5m",
        "warning",
        "A tenth of the sequences wait longer than 5 s to begin, or none begins at all",
        "Add target replicas, or lower limits.max_queued_requests, so that clients are refused early.",
        "first-tokens-are-slow",
    )
    refused = f'sum {SERVICE} (rate(specdec_http_requests_total{{status="429"}}[5m]))'
    answered = f"sum {SERVICE} (rate(specdec_http_requests_total[5m]))"
    yield _alert(
        "SpecdecRequestsRefused",
        f"{refused} / ({answered} > 0) > 0.05",
        "5m",
        "warning",
        "More than 5% of all requests are refused with 429",
        "Add target replicas, or raise replicas.target.max; if targets have room, raise the limit that the 429 names.",
        "requests-get-429",
    )
    gpu = "by (namespace, ray_io_cluster, instance, GpuIndex)"
    used = f"max {gpu} (ray_node_gram_used)"
    yield _alert(
        "SpecdecGpuMemoryFull",
        f"{used} / ({used} + max {gpu} (ray_node_gram_available)) > 0.97",
        "10m",
        "warning",
        "Less than 3% of a GPU's memory is free: the next allocation may fail",
        "Lower kv_cache_memory or gpu_memory_utilization of the model on that GPU.",
        "memory-is-full",
    )
    for name, words, section, family, most_s in SLOS:
        for speed, times, short, long, lasting, severity in BURNS:
            least = f"{times} * {round(1 - SLO_SHARE, 6)}"
            yield _alert(
                f"Specdec{name.capitalize()}Burn{speed}",
                f"{slow_ratio(name, short)} > {least} and {slow_ratio(name, long)} > {least}"
                f" and {ON_MODEL} sum {MODEL} (rate({family.series}_count[{long}])) > {LEAST_RATE}",
                lasting,
                severity,
                f"{words} exceeds {most_s} s for over {times:g}% of sequences, over {short} and {long}; 1% is allowed",
                "Read queue, prefill and step times on the service dashboard: a long queue needs more targets.",
                section,
            )


def _faults() -> Iterator[Rule]:
    answers = f"sum {SERVICE} (rate(specdec_http_requests_total[5m]))"
    failed = f'sum {SERVICE} (rate(specdec_http_requests_total{{status=~"5.."}}[5m]))'
    yield _alert(
        "SpecdecServerErrors",
        f"{failed} / ({answers} > 0) > 0.05",
        "5m",
        "critical",
        "More than 5% of all answers are 5xx",
        "Read the errors' codes on the service dashboard, then search the ingress' log for a request's id.",
        "requests-get-5xx",
    )
    yield _alert(
        "SpecdecCrashLoop",
        f"max {BY_KIND} (increase(specdec_worker_deaths_total[15m])) > 3",
        "0m",
        "critical",
        "Workers of one kind died more than three times within 15 minutes",
        "Read the end of the dead replicas' logs; if one request goes with each death, refuse that one.",
        "a-target-hangs-or-dies",
    )
    contained = ("failed_steps", "worker_errors", "skipped_sequences", "suspects")
    yield _alert(
        "SpecdecStepsFail",
        " or ".join(f"sum {SERVICE} (increase(specdec_{name}_total[15m])) > 5" for name in contained),
        "0m",
        "warning",
        "Steps or sequences fail and the service goes on: clients see 500 or finish_reason error",
        "Search the workers' logs for 'failed' and 'out of memory'; a logits processor that raises is the usual cause.",
        "requests-get-5xx",
    )
    lacking = " or ".join(
        f'min {SERVICE} (specdec_router_workers{{kind="{kind}"}}) < {workers}'
        for kind, workers in (
            ("target", f'count {SERVICE} (specdec_worker_sequences{{deployment="TargetServer"}})'),
            ("drafter", _of_service(f'count {SERVICE} (specdec_worker_sequences{{deployment="DraftServer"}})')),
        )
    )
    sent = _of_service(f'sum {SERVICE} (rate(specdec_offers_total{{deployment="DraftServer"}}[5m]))')
    come = f'sum {SERVICE} (rate(specdec_offers_total{{deployment="TargetServer"}}[5m]))'
    yield _alert(
        "SpecdecRouterLinkDown",
        f"{lacking} or ({sent} > 0 and {come} == 0)",
        "3m",
        "warning",
        "A router has no link to a live worker, or drafts do not reach their targets",
        "Search the workers' logs for 'link to'; check the network, and that all nodes have one version and pair.",
        "a-link-is-down",
    )


def _updates() -> Iterator[Rule]:
    """By Serve's own status of applications (1: the deployment failed), by /health, and by KubeRay's."""
    status = f"max {SERVICE} (ray_serve_application_status)"
    yield _alert(
        "SpecdecUpdateFailed",
        f"{status} == 1",
        "1m",
        "warning",
        "An update has failed: the old version serves on, unless it was replaced",
        "Read `update` at /health, then deploy the previous configuration again.",
        "an-update-does-not-end",
    )
    yield _alert(
        "SpecdecUpdateLate",
        f"max {SERVICE} (specdec_update_late) == 1",
        "1m",
        "warning",
        "An update takes longer than update_timeout_s",
        "Read `update` at /health. A surge waits for a free device: free one, or set updates of that model to replace.",
        "an-update-does-not-end",
    )
    yield _alert(
        "SpecdecRayServiceNotReady",
        'max by (namespace, exported_namespace, name) (kuberay_service_condition_ready{condition="false"}) == 1',
        "5m",
        "critical",
        "KubeRay reports a RayService as not ready: none of its pods takes requests",
        "Run kubectl describe on the RayService, and look for pods that do not start.",
        "a-replica-does-not-come-up",
    )


def _of_service(of_draft: str) -> str:
    """Series of the draft model's application, NAME-draft, under the name of its service."""
    return f'label_replace({of_draft}, "application", "$1", "application", "(.+)-draft")'


def _rate(name: str) -> str:
    return f"(rate(specdec_{name}[5m]))"


def _record(name: str, expression: str) -> Rule:
    return {"record": name, "expr": expression}


def _alert(
    name: str, expression: str, lasting: str, severity: Severity, summary: str, runbook: str, section: str
) -> Rule:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "runbook": runbook, "docs": f"{PAGE}#{section}"},
    }


def rules_file() -> dict[str, Any]:
    """The whole file: ``rule_files`` of a plain Prometheus, and the spec of a PrometheusRule."""
    return {
        "groups": [
            {"name": "specdec-recorded", "rules": list(recording_rules())},
            {"name": "specdec-alerts", "rules": list(alerts())},
        ]
    }


def manifest(labels: dict[str, str]) -> dict[str, Any]:
    """The same for the operator of kube-prometheus, which selects it by labels."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "specdec", "labels": labels},
        "spec": rules_file(),
    }
