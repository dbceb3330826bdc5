"""A service whose store, and then one of whose ingresses, hangs or dies while requests run."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import psutil
import pytest

from cluster.models.demos import demo_folder
from specdec import ModelSource
from specdec.models.describe import linear_shapes
from tests.integration.kills import Comparison, Streams, kill_one
from tests.integration.running import RunningService, eventually
from tests.specdec.adapters import write_adapter

KEY = "sk-ops-0123456789abc"
HEADERS = {"Authorization": f"Bearer {KEY}"}
ASK = {"model": "specdec-demo", "input": "def f(x):", "max_output_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "sql", linear_shapes(ModelSource(str(demo_folder("target")))), 4, 0)
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ops: {KEY}\n")
    flags = ["--lora-folder", str(folder), "--access-api-keys-file", str(keys), "--access-admin-keys", "ops"]
    flags += ["--no-access-metrics-need-key", "--responses-store-enabled", "--replicas-ingress", "2"]
    flags += ["--replicas-router", "2"]
    running = RunningService(*flags)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def http(service: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"{service.url}/v1", headers=HEADERS, timeout=120, trust_env=False) as client:
        yield client


def processes(service: RunningService, name: str) -> list[psutil.Process]:
    found = []
    for child in service.children():
        try:
            if name in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def last_response(http: httpx2.Client) -> dict[str, Any]:
    """The response that a stream ends with."""
    answer = http.post("/responses", json=ASK | {"stream": True})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    return dict(events[-1]["response"])


def is_stored(http: httpx2.Client) -> bool:
    answer = http.post("/responses", json=ASK)
    assert answer.status_code == 200, "an answer failed with its store"
    return "x-specdec-warning" not in answer.headers


def test_answers_go_out_while_the_store_hangs_and_when_it_has_died(
    service: RunningService, http: httpx2.Client
) -> None:
    loaded = http.post("/load_lora_adapter", json={"lora_name": "sql", "lora_path": "sql"})
    assert loaded.status_code == 200, loaded.text
    assert all(http.get("/models/sql").status_code == 200 for _ in range(8)), "each ingress knows it"
    kept = last_response(http)
    assert (kept["store"], kept.get("warning")) == (True, None)
    assert http.get(f"/responses/{kept['id']}").json() == kept

    (store,) = processes(service, "MemoryStore")
    store.send_signal(signal.SIGSTOP)
    try:
        whole = http.post("/responses", json=ASK)
        assert (whole.status_code, whole.json()["store"]) == (200, False)
        assert whole.headers["x-specdec-warning"] == whole.json()["warning"]
        assert whole.json()["output"][0]["content"] == kept["output"][0]["content"]
        streamed = last_response(http)
        assert (streamed["store"], streamed["warning"]) == (False, whole.json()["warning"])
        assert http.get(f"/responses/{kept['id']}").status_code == 503
        assert http.post("/completions", json={"model": "sql", "prompt": "x", "max_tokens": 1}).status_code == 200
        assert service.is_ready()
    finally:
        store.send_signal(signal.SIGCONT)
    eventually(lambda: is_stored(http), 60, "the store answers again")
    assert http.get(f"/responses/{kept['id']}").json() == kept

    store.send_signal(signal.SIGKILL)
    eventually(lambda: is_stored(http), 120, "another store has started")
    assert http.get(f"/responses/{kept['id']}").status_code == 404, "what it kept is gone with it"
    assert http.post("/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200, "it was put back"
    eventually(lambda: {http.get("/models/sql").status_code for _ in range(8)} == {404}, 60, "and every ingress knows")


@pytest.mark.parametrize("part", ["OpenAIIngress", "SpeculationRouter"])
def test_one_replica_that_hangs_costs_neither_health_nor_metrics_and_is_replaced(
    service: RunningService, part: str
) -> None:
    replicas = processes(service, part)
    assert len(replicas) == 2
    hanging = replicas[0]
    hanging.send_signal(signal.SIGSTOP)
    started_s, longest_s = time.monotonic(), 0.0
    try:
        while hanging.is_running() and time.monotonic() < started_s + 10:
            asked_s = time.monotonic()
            assert service.is_ready(), "one of two serves"
            longest_s = max(longest_s, time.monotonic() - asked_s)
            page = service.metrics()
            assert any("OpenAIIngress" in series for series in page)
            assert any("SpeculationRouter" in series for series in page)
        gone_s = eventually(lambda: not _is_there(hanging), 120, "it is gone")
    finally:
        if _is_there(hanging):
            hanging.send_signal(signal.SIGCONT)
    eventually(lambda: len(processes(service, part)) == 2, 120, "another has taken its place")
    print(
        f"killed {time.monotonic() - started_s:.1f} s after it hung, at the latest ({gone_s:.1f} s waited); "
        f"/health took {longest_s:.1f} s at most"
    )
    assert service.is_ready()


def test_health_waits_for_another_replica_where_its_only_one_has_died(service: RunningService) -> None:
    (health,) = [one for one in processes(service, "Health") if "ray::" in " ".join(one.cmdline())]
    health.send_signal(signal.SIGKILL)
    with httpx2.Client(timeout=60, trust_env=False) as client:
        assert client.get(f"{service.url}/v1/models", headers=HEADERS).status_code == 200, "requests do not need it"
        assert {client.get(f"{service.url}/health").status_code for _ in range(4)} == {200}
    assert len([one for one in processes(service, "Health") if _is_there(one)]) == 1


def test_an_ingress_that_dies_takes_its_own_streams_and_nothing_from_the_store(
    service: RunningService, http: httpx2.Client
) -> None:
    loaded = http.post("/load_lora_adapter", json={"lora_name": "sql", "lora_path": "sql"})
    assert loaded.status_code == 200, loaded.text
    kept = last_response(http)
    assert kept["store"] is True
    streams = Streams(service.url, "specdec-demo", count=12, max_tokens=300, headers=HEADERS)
    with streams.running() as wait:
        undisturbed = wait()
    with streams.running() as wait:
        eventually(streams.have_begun, 120, "all streams have begun")
        killed, killed_s = kill_one(service, "ingress"), time.monotonic()
        assert killed is not None
        assert http.get(f"/responses/{kept['id']}").json() == kept
        assert http.post("/completions", json={"model": "sql", "prompt": "x", "max_tokens": 1}).status_code == 200
        answered_s = time.monotonic() - killed_s
        compared = Comparison.of(wait(), undisturbed)
    assert 0 < len(compared.broken) < streams.count, "those of the dead one alone"
    assert compared.is_exact
    assert compared.num_tokens == 300 * (streams.count - len(compared.broken))
    eventually(lambda: len(processes(service, "OpenAIIngress")) == 2, 120, "another has taken its place")
    eventually(service.is_ready, 120, "the service is ready")
    ready_s = time.monotonic() - killed_s
    for _ in range(8):  # the new one among them
        assert http.get(f"/responses/{kept['id']}").json() == kept
        assert http.get("/models/sql").status_code == 200
    print(f"{len(compared.broken)} streams broke; answered after {answered_s:.1f} s, whole after {ready_s:.1f} s")


def _is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
