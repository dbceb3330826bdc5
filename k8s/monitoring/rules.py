"""Recording rules and alerts, as Prometheus reads them.

Whatever is compared here is summed over the replicas of one service: series of one namespace, Ray cluster, application
and model. Namespace and cluster are what a Prometheus on Kubernetes adds; elsewhere the rules are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from deployments.metrics.families import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN, Family

SLOS_S: tuple[tuple[str, Family, float], ...] = (
    ("ttft", TIME_TO_FIRST_TOKEN, 2.5),
    ("itl", INTER_TOKEN_LATENCY, 0.2),
)
"""Short name, histogram, and the seconds within which it should be: one of the histogram's bounds."""
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
    for name, family, most_s in SLOS_S:
        for window in WINDOWS:
            within = f'sum {MODEL} (rate({family.series}_bucket{{le="{most_s}"}}[{window}]))'
            count = f"sum {MODEL} (rate({family.series}_count[{window}]))"
            yield _record(slow_ratio(name, window), f"1 - {within} / ({count} > 0)")


def slow_ratio(name: str, window: str) -> str:
    """The recorded share of observations that take longer than they should."""
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
        "No router of any service tells anything: all of them are down, or nobody scrapes them",
        "See whether Prometheus has the targets of the PodMonitor, and whether the RayService's pods run.",
    )
    # An upgrade makes another Ray cluster of the same service, so that the cluster is no part of what is missed.
    largest = f"max {SERVICE_ANYWHERE}"
    yield _alert(
        "SpecdecServiceMissing",
        f"{largest} (present_over_time(specdec_router_workers[1d])) unless {largest} (specdec_router_workers)",
        "5m",
        "critical",
        "A service that had routers within the last day has none that reports",
        "See whether the RayService's pods run and are scraped; silence the alert if the service was deleted.",
    )
    by_kind = "max by (namespace, ray_io_cluster, application, kind)"
    yield _alert(
        "SpecdecFewerWorkers",
        f"{by_kind} (specdec_router_workers) < {by_kind} (specdec_min_workers)",
        "15m",
        "warning",
        "Routers have fewer workers of a kind than the configuration wants in any case",
        "Look for a replica that does not come up in Serve's status.",
    )
    yield _alert(
        "SpecdecTargetDown",
        f'max {SERVICE} (specdec_router_workers{{kind="target"}}) == 0',
        "1m",
        "critical",
        "No router has a target: requests wait and then fail",
        "Look at the TargetServer replicas in Serve's status and log; out of memory and unreadable files are the usual"
        " causes.",
    )
    yield _alert(
        "SpecdecDraftDown",
        f'max {SERVICE} (specdec_router_workers{{kind="drafter"}}) == 0 and {ON_SERVICE}'
        f' (max {SERVICE} (specdec_min_workers{{kind="drafter"}}) > 0'
        f" or sum {SERVICE} (specdec_sequences_without_drafter) > 0)",
        "1m",
        "warning",
        "No router has a drafter: answers are the same, but slower",
        "Look at the DraftServer replicas in Serve's status and log; the target goes on by itself meanwhile.",
    )


def _speculation() -> Iterator[Rule]:
    acceptance = "specdec:acceptance:ratio_rate5m"
    yield _alert(
        "SpecdecAcceptanceCollapse",
        f"{acceptance} < 0.5 * avg_over_time({acceptance}[1d]) and {ON_MODEL} specdec:draft_tokens:rate5m > 1",
        "10m",
        "warning",
        "Less than half as many draft tokens are accepted as over the last day",
        "Compare the revisions of target and draft with yesterday's; then see whether prompts or temperatures changed.",
    )
    gain = f"max {SERVICE} (avg_over_time(specdec_measured_gain[30m])) < 1.05"
    busy = f"sum {SERVICE} (avg_over_time(specdec_planned_sequences[30m])) > 0.5"
    yield _alert(
        "SpecdecSpeculationNotPaying",
        f"({gain} and {ON_SERVICE} {busy}) or max {SERVICE} (specdec_controller_failed) == 1",
        "15m",
        "warning",
        "Speculation gains less than 5 % over plain decoding, or its controller has failed",
        "Search the router's log for the controller; else use a faster draft, or none: its device earns nothing.",
    )


def _load() -> Iterator[Rule]:
    yield _alert(
        "SpecdecKvNearlyFull",
        "max by (namespace, ray_io_cluster, application, deployment, replica) (specdec_kv_cache_usage_perc) > 0.95",
        "10m",
        "warning",
        "Nearly all cache blocks of a worker are held by sequences: others wait or lose theirs",
        "Add replicas or cache memory, or lower limits.max_total_tokens.",
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
        "Add target replicas, or lower limits.max_queued_requests so that clients are refused early.",
    )
    refused = f'sum {SERVICE} (rate(specdec_http_requests_total{{status="429"}}[5m]))'
    answered = f"sum {SERVICE} (rate(specdec_http_requests_total[5m]))"
    yield _alert(
        "SpecdecRefusing",
        f"{refused} / ({answered} > 0) > 0.05",
        "5m",
        "warning",
        "More than 5 % of all requests are refused with 429",
        "Add target replicas, raise replicas.target.max, or raise limits if the targets have room.",
    )
    gpu = "by (namespace, ray_io_cluster, instance, GpuIndex)"
    used = f"max {gpu} (ray_node_gram_used)"
    yield _alert(
        "SpecdecGpuMemoryFull",
        f"{used} / ({used} + max {gpu} (ray_node_gram_available)) > 0.97",
        "10m",
        "warning",
        "A GPU has less than 3 % of its memory free: the next allocation may fail",
        "Lower kv_cache_memory of the model on that GPU, or give it a larger share.",
    )
    for name, family, most_s in SLOS_S:
        for speed, times, short, long, lasting, severity in BURNS:
            least = f"{times} * {round(1 - SLO_SHARE, 6)}"
            yield _alert(
                f"Specdec{name.capitalize()}Burn{speed}",
                f"{slow_ratio(name, short)} > {least} and {slow_ratio(name, long)} > {least}"
                f" and {ON_MODEL} sum {MODEL} (rate({family.series}_count[{long}])) > {LEAST_RATE}",
                lasting,
                severity,
                f"{name.upper()} is over {most_s} s so often that the budget goes {times} times too fast",
                "See the service dashboard: a long queue asks for replicas, slow steps for shorter drafts or prompts.",
            )


def _faults() -> Iterator[Rule]:
    answers = f"sum {SERVICE} (rate(specdec_http_requests_total[5m]))"
    failed = f'sum {SERVICE} (rate(specdec_http_requests_total{{status=~"5.."}}[5m]))'
    yield _alert(
        "SpecdecErrors",
        f"{failed} / ({answers} > 0) > 0.05",
        "5m",
        "critical",
        "More than 5 % of all answers are errors of the service",
        "See the codes on the service dashboard, then the ingress' log for the requests' ids.",
    )
    yield _alert(
        "SpecdecCrashLoop",
        "max by (namespace, ray_io_cluster, application, kind) (increase(specdec_worker_deaths_total[15m])) > 3",
        "0m",
        "critical",
        "Workers of one kind die again and again",
        "Read the end of the dead replicas' logs; if one request goes with each death, refuse that one.",
    )
    contained = ("failed_steps", "worker_errors", "skipped_sequences", "suspects")
    yield _alert(
        "SpecdecContainedFaultsRising",
        " or ".join(f"sum {SERVICE} (increase(specdec_{name}_total[15m])) > 5" for name in contained),
        "0m",
        "warning",
        "Steps or sequences fail, and the service goes on: clients see finish_reason error",
        "Search the workers' logs for the failed sequence: a logits processor that raises, or too little memory.",
    )
    lacking = " or ".join(
        f'min {SERVICE} (specdec_router_workers{{kind="{kind}"}})'
        f' < count {SERVICE} (specdec_worker_sequences{{deployment="{deployment}"}})'
        for kind, deployment in (("target", "TargetServer"), ("drafter", "DraftServer"))
    )
    sent, come = (
        f'sum {SERVICE} (rate(specdec_offers_total{{deployment="{deployment}"}}[5m]))'
        for deployment in ("DraftServer", "TargetServer")
    )
    yield _alert(
        "SpecdecRouterLinkDown",
        f"{lacking} or ({sent} > 0 and {come} == 0)",
        "3m",
        "warning",
        "A router has no link to a worker that lives, or drafts do not reach their targets",
        "Check the network between the nodes, and whether all have the same version, models and environment.",
    )


def _updates() -> Iterator[Rule]:
    """By Serve's own status of applications (1: the deployment failed), by /health, and by KubeRay's."""
    status = f"max {SERVICE} (ray_serve_application_status)"
    yield _alert(
        "SpecdecUpdateFailed",
        f"{status} == 1",
        "1m",
        "warning",
        "An update has failed: what ran before serves on, unless it was replaced",
        "Read `update` at /health, then deploy the previous configuration again.",
    )
    yield _alert(
        "SpecdecUpdateLate",
        f"max {SERVICE} (specdec_update_late) == 1",
        "1m",
        "warning",
        "An update takes longer than update_timeout_s",
        "Read `update` at /health: a surge waits for a free device; free one, or set updates of that model to replace.",
    )
    yield _alert(
        "SpecdecRayServiceNotReady",
        'max by (namespace, exported_namespace, name) (kuberay_service_condition_ready{condition="false"}) == 1',
        "5m",
        "critical",
        "KubeRay says that a RayService is not ready: it has no pod that takes requests",
        "Run kubectl describe on the RayService, and look for pods that do not start.",
    )


def _rate(name: str) -> str:
    return f"(rate(specdec_{name}[5m]))"


def _record(name: str, expression: str) -> Rule:
    return {"record": name, "expr": expression}


def _alert(name: str, expression: str, lasting: str, severity: Severity, summary: str, runbook: str) -> Rule:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "runbook": runbook},
    }


def rules_file() -> dict[str, Any]:
    """The whole file: ``rule_files`` of a plain Prometheus, and the spec of a PrometheusRule."""
    return {
        "groups": [
            {"name": "specdec-recorded", "rules": list(recording_rules())},
            {"name": "specdec-alerts", "rules": list(alerts())},
        ]
    }


def manifest() -> dict[str, Any]:
    """The same for the operator of kube-prometheus."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "specdec"},
        "spec": rules_file(),
    }
