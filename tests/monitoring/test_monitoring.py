"""Dashboards, rules and alerts on a real Prometheus that watches a real service, two replicas of each part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import pytest

from tests.integration.kills import Streams, processes_of
from tests.integration.poison import HOOK, KINDS
from tests.integration.running import RunningService, eventually
from tests.integration.watched import PAGE, RAY, Prometheus, watched
from tests.k8s.test_monitoring import DASHBOARDS, RECORDED, queries

TWO_OF_EACH = [f"--replicas-{part}=2" for part in ("target", "draft", "router", "ingress")]
PAYING = ("--backend", "benchmarks.backends:stand_in:target=30,draft=3")
"""Devices on which speculation pays, so that the controller drafts on any machine."""
WINDOW = "15s"
"""What Grafana puts in place of ``$__rate_interval``, at one scrape a second."""
PATIENCE_S = 240.0
OF_NODES, OF_GPUS = "ray_node_", ("ray_node_gram", "ray_node_gpus")
"""Series that only Ray's exporters have, and those that they have only where there are GPUs."""


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    fast = {"RAY_metrics_report_interval_ms": "1000"}
    running = RunningService(*TWO_OF_EACH, *PAYING, "--logits-processors", HOOK, environment=fast)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def by_ray(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with watched(service, RAY, tmp_path_factory.mktemp("ray") / "prometheus") as prometheus:
        yield prometheus


@pytest.fixture(scope="module")
def by_page(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with watched(service, PAGE, tmp_path_factory.mktemp("page") / "prometheus") as prometheus:
        yield prometheus


@contextmanager
def repeated(act: Callable[[], object], period_s: float) -> Iterator[None]:
    """Do something again and again meanwhile."""
    done = threading.Event()

    def go_on() -> None:
        while not done.is_set():
            act()
            done.wait(period_s)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def some_requests(service: RunningService) -> None:
    """Two streams, and a request that is refused."""
    with Streams(service.url, service.model, count=2, max_tokens=60).running() as wait:
        assert not [stream.error for stream in wait() if stream.error]
    body = {"model": "none", "prompt": "x"}
    assert httpx2.post(f"{service.url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 404


def as_chosen(query: str) -> str:
    """A panel's query with every variable at All."""
    for variable in ("namespace", "model", "replica"):
        query = query.replace(f"${variable}", ".*")
    return query.replace("$__rate_interval", WINDOW)


@pytest.mark.parametrize("source", ["by_ray", "by_page"])
@pytest.mark.timeout(600)
def test_every_panel_and_every_recorded_series_has_data(
    service: RunningService, source: str, request: pytest.FixtureRequest
) -> None:
    prometheus: Prometheus = request.getfixturevalue(source)
    asked = {as_chosen(query) for dashboard in DASHBOARDS.values() for query in queries(dashboard)} | RECORDED
    absent = OF_GPUS if source == "by_ray" else (OF_NODES,)
    missing = {query for query in asked if not query.startswith(absent)}

    def all_have_had_data() -> bool:
        missing.difference_update([query for query in missing if prometheus.query(query)])
        return not missing

    with repeated(lambda: some_requests(service), 0.5):
        end_s = time.monotonic() + PATIENCE_S
        while not all_have_had_data() and time.monotonic() < end_s:
            time.sleep(1.0)
    assert missing == set()
    assert [rule for rule in prometheus.rules() if rule["health"] != "ok"] == []


def test_labels_are_those_of_the_page(by_ray: Prometheus, by_page: Prometheus) -> None:
    own = {"application", "deployment", "replica", "model_name", "kind"}
    for prometheus in (by_ray, by_page):
        found = prometheus.query("specdec_router_workers")
        assert len(found) == 4, "two routers, two kinds"
        assert {value["value"][1] for value in found} == {"2"}
        assert all(set(series["metric"]) == own | {"__name__", "instance", "job"} for series in found)


@pytest.mark.parametrize(
    ("fault", "alert"),
    [
        ("draft", "SpecdecDraftDown"),
        ("target", "SpecdecTargetDown"),
        ("poison", "SpecdecStepsFail"),
    ],
)
@pytest.mark.timeout(900)
def test_an_alert_fires_while_its_fault_is_kept_up_and_clears_after_it(
    service: RunningService, by_ray: Prometheus, by_page: Prometheus, fault: str, alert: str
) -> None:
    both = (by_ray, by_page)
    eventually(lambda: not any(alert in one.firing() for one in both), PATIENCE_S, "nothing is wrong yet")
    with repeated(lambda: keep_up(service, fault), 0.5):
        eventually(lambda: all(alert in one.firing() for one in both), PATIENCE_S, f"{alert} fires by both")
    eventually(lambda: not any(alert in one.firing() for one in both), PATIENCE_S, f"{alert} has cleared")
    eventually(service.is_ready, PATIENCE_S, "ready again")


def keep_up(service: RunningService, fault: str) -> None:
    """Kill what has come back, or send a request that raises."""
    if fault != "poison":
        for process in processes_of(service, fault):
            process.kill()
        return
    body = {"model": service.model, "prompt": "x", "max_tokens": 20, "ignore_eos": True}
    body |= {"logit_bias": {str(KINDS["raise"]): 0.5}}
    httpx2.post(f"{service.url}/v1/completions", json=body, timeout=120, trust_env=False)
