"""The service's page: what replicas tell, put together."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deployments.http.observer import Observer
from deployments.metrics.page import ReplicaPage, metrics_page
from deployments.metrics.replica import MachineMetrics


def of_ingress(replica: str, num_tokens: int) -> ReplicaPage:
    registry = CollectorRegistry()
    sequence = Observer(registry, "m").opened("m", "somebody", 0.0)
    sequence.tokens(num_tokens, 0, [])
    sequence.delivered(num_tokens)
    return ReplicaPage("app", "OpenAIIngress", replica, generate_latest(registry))


def of_target(replica: str, num_steps: int) -> ReplicaPage:
    registry, machine = CollectorRegistry(), MachineMetrics("target", "m")
    machine.metrics = {"num_steps": num_steps}
    registry.register(machine)
    return ReplicaPage("app", "TargetServer", replica, generate_latest(registry))


def samples(text: bytes, name: str) -> dict[str, float]:
    return {
        sample.labels["replica"]: sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    }


def test_samples_of_all_replicas_are_in_one_family_each() -> None:
    pages = [of_ingress("i1", 3), of_target("t1", 7), of_ingress("i2", 4), of_target("t2", 8)]
    text = metrics_page(pages, {"OpenAIIngress": 1})
    assert samples(text, "specdec_generation_tokens_total") == {"i1": 3, "i2": 4}
    assert samples(text, "specdec_steps_total") == {"t1": 7, "t2": 8}
    assert samples(text, "specdec_time_to_first_token_seconds_count") == {"i1": 1, "i2": 1}
    assert text.count(b"# TYPE specdec_generation_tokens_total counter") == 1
    assert b"_created" not in text
    assert text.count(b"# TYPE specdec_time_to_first_token_seconds histogram") == 1
    whose = b'application="app",deployment="TargetServer",model_name="m",replica="t1"'
    assert b"specdec_steps_total{" + whose + b"} 7.0" in text
    assert b'specdec_scrape_failures_total{deployment="OpenAIIngress"} 1.0' in text


def test_a_page_without_replicas_is_a_page() -> None:
    text = metrics_page([], {"OpenAIIngress": 0})
    assert b"specdec_steps" not in text
    assert text.startswith(b"# All live replicas")
