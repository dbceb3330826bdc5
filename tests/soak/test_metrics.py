"""Metrics of two replicas of each add up to what clients counted, by ``/metrics`` and by Ray's exporter."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.kills import kill_one, processes_of
from tests.integration.running import RunningService, eventually

PARTS = ("target", "draft", "router", "ingress")
TWO_OF_EACH = [flag for part in PARTS for flag in (f"--replicas-{part}", "2")]
LIMITS = ("--limits-max-concurrent-requests", "8", "--limits-max-queued-requests", "4")
DRAFTS = ("--num-speculative-tokens", "4", "--speculation-mode", "sequential")
NUM_REQUESTS = 500
NUM_KILL_REQUESTS = 150
AT_ONCE = 24
EXPORTED_S = 120.0


@dataclass
class Counted:
    """What clients counted from their answers."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def usage(self, answer: dict[str, Any], num_sequences: int) -> None:
        """The last part of an answer, or all of it."""
        usage, counts = answer["usage"], (answer.get("metrics") or {}).get("speculative_decoding") or {}
        self.tokens["prompt_tokens"] += usage["prompt_tokens"]
        self.tokens["generation_tokens"] += usage["completion_tokens"]
        self.tokens["request_success"] += num_sequences
        self.tokens["spec_decode_num_drafts"] += counts.get("num_spec_steps", 0)
        self.tokens["spec_decode_num_draft_tokens"] += counts.get("num_draft_tokens", 0)
        self.tokens["spec_decode_num_accepted_tokens"] += counts.get("num_accepted_draft_tokens", 0)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = RunningService(*TWO_OF_EACH, *LIMITS, *DRAFTS, environment={"RAY_metrics_report_interval_ms": "1000"})
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def exporter(service: RunningService) -> str:
    """Where Ray's exporter listens, as the service says at its start."""
    return next(found[0] for found in (re.search(r"http://\S+/metrics", line) for line in service.lines) if found)


@pytest.fixture(scope="module")
def counted(service: RunningService) -> Counted:
    counted = Counted()
    asyncio.run(mixed(service, counted, range(NUM_REQUESTS)))
    return counted


async def mixed(service: RunningService, counted: Counted, numbers: Iterable[int]) -> None:
    """Send requests of all kinds, and count what their answers say."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx2.AsyncClient(base_url=service.url, timeout=300, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        counted.statuses["/v1/models", "200"] += 1
        await asyncio.gather(*(ask(client, gate, model, i, counted) for i in numbers))


async def ask(client: httpx2.AsyncClient, gate: asyncio.Semaphore, model: str, i: int, counted: Counted) -> None:
    """One request: a stream, two samples, one that stops early, one with an error, or one for no model."""
    body: dict[str, Any] = {"model": model, "prompt": f"def f{i}(n):", "max_tokens": 8 + i % 17, "seed": i}
    body |= {"temperature": i % 2, "per_request_spec_decode_metrics": "summary"}
    kind, num_sequences = i % 7, 1
    if kind in (0, 1, 2):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    elif kind == 3:
        body |= {"n": 2, "num_speculative_tokens": 0}
        num_sequences = 2
    elif kind == 4:
        body |= {"stop": "\n"}
    elif kind == 5:
        body |= {"temperature": 9}
    else:
        body |= {"model": "none"}
    async with gate:
        if not body.get("stream"):
            answer = await client.post("/v1/completions", json=body)
            found = answer.json()
        else:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
            whole = answer.status_code != 200
            found = json.loads("".join(lines) if whole else lines[-2].removeprefix("data: "))
    counted.statuses["/v1/completions", str(answer.status_code)] += 1
    if answer.status_code == 200:
        counted.usage(found, num_sequences)
    else:
        counted.codes[found["error"]["code"]] += 1


class Sums:
    """A page's samples, summed over replicas."""

    def __init__(self, page: str) -> None:
        self.samples = [
            sample for family in text_string_to_metric_families(page) for sample in family.samples if sample.value
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Of the series that have these labels."""
        wanted = {label: {value, ""} if value == "none" else {value} for label, value in labels.items()}
        return sum(
            one.value
            for one in self.samples
            if one.name == name and all(one.labels.get(label) in allowed for label, allowed in wanted.items())
        )

    def differing(self, counted: Counted) -> dict[str, tuple[float, float]]:
        """What is not as clients counted it: here, and there."""
        pairs = {name: (self.sum(f"specdec_{name}_total"), float(number)) for name, number in counted.tokens.items()}
        for (path, status), number in counted.statuses.items():
            # What is refused before its body is read has not been looked for among the paths.
            shown = sum(self.sum("specdec_http_requests_total", path=p, status=status) for p in (path, "none"))
            pairs[f"{path} {status}"] = shown, float(number)
        for code, number in counted.codes.items():
            pairs[code] = self.sum("specdec_http_errors_total", code=code), float(number)
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def of_service(service: RunningService) -> Sums:
    return Sums(httpx2.get(f"{service.url}/metrics", timeout=60, trust_env=False).text)


def of_ray(exporter: str) -> Sums:
    """Ray's exporter, with the names that the relabelling rule of ``deployments/monitoring`` makes."""
    page = httpx2.get(exporter, timeout=60, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("ray_specdec_")]
    rule = re.compile(r"^(?:ray_(specdec_\w*_(?:bucket|sum|count))_total|ray_(specdec_\w*))")
    return Sums("\n".join(rule.sub(lambda m: m[1] or m[2], line) for line in lines) + "\n")


def test_both_pages_add_up_to_what_clients_counted(service: RunningService, counted: Counted, exporter: str) -> None:
    assert len(counted.statuses) >= 4, "there were answers, errors and refusals"
    assert counted.codes.keys() >= {"model_not_found", "overloaded"}
    assert counted.tokens["spec_decode_num_accepted_tokens"] > 0
    page = of_service(service)
    assert page.differing(counted) == {}
    came = counted.tokens["generation_tokens"] + page.sum("specdec_discarded_tokens_total")
    assert page.sum("specdec_committed_tokens_total") >= came, "more is decided than comes where a text has ended"
    for deployment in ("OpenAIIngress", "SpeculationRouter", "TargetServer", "DraftServer"):
        shown = {one.labels["replica"] for one in page.samples if one.labels.get("deployment") == deployment}
        assert len(shown) == 2, deployment
    eventually(lambda: not of_ray(exporter).differing(counted), EXPORTED_S, f"{of_ray(exporter).differing(counted)}")


def test_the_same_series_by_both_ways(service: RunningService, counted: Counted, exporter: str) -> None:
    def series(sums: Sums) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        own = ("application", "deployment", "replica", "model_name", "key", "path", "status", "code", "position", "le")
        return {
            (one.name, frozenset((label, one.labels[label]) for label in own if one.labels.get(label)))
            for one in sums.samples
            if one.name.startswith("specdec_") and "scrape_failures" not in one.name
        }

    ours = series(of_service(service))
    eventually(lambda: ours <= series(of_ray(exporter)), EXPORTED_S, f"{sorted(ours - series(of_ray(exporter)))[:3]}")


def test_kills_under_load_make_no_counter_of_a_survivor_wrong(
    service: RunningService, counted: Counted, exporter: str
) -> None:
    """Requests are opened again by others, and what clients counted is counted once; the ingresses survive."""
    killed = []

    async def kill_some() -> None:
        for victim in ("target", "draft", "router"):
            seen = sum(counted.statuses.values())
            while sum(counted.statuses.values()) < seen + NUM_KILL_REQUESTS // 6:
                await asyncio.sleep(0.05)
            killed.append(kill_one(service, victim))

    async def both() -> None:
        numbers = range(NUM_REQUESTS, NUM_REQUESTS + NUM_KILL_REQUESTS)
        await asyncio.gather(mixed(service, counted, numbers), kill_some())

    asyncio.run(both())
    assert len(killed) == 3
    assert None not in killed
    assert of_service(service).differing(counted) == {}
    eventually(lambda: not of_ray(exporter).differing(counted), EXPORTED_S, f"{of_ray(exporter).differing(counted)}")
    eventually(service.is_ready, 240, "ready again")
    eventually(lambda: all(len(processes_of(service, one)) == 2 for one in PARTS), 240, "two of each again")


def test_what_dead_replicas_counted_stays_with_rays_exporter(
    service: RunningService, counted: Counted, exporter: str
) -> None:
    """All that clients counted had been exported when they died."""
    for victim in PARTS:
        kill_one(service, victim)
    eventually(service.is_ready, 240, "ready again")
    eventually(lambda: len(processes_of(service, "ingress")) == 2, 240, "two ingresses again")
    assert of_ray(exporter).differing(counted) == {}
    lost = of_service(service).differing(counted)
    assert all(shown <= number for shown, number in lost.values())


def test_tokens_of_cancelled_streams_are_somewhere(service: RunningService, counted: Counted, exporter: str) -> None:
    """A client cannot tell what was on its way to it: what it counted is a part of what was decided."""
    before = of_ray(exporter)

    async def cancel_some() -> int:
        async with httpx2.AsyncClient(base_url=service.url, timeout=300, trust_env=False) as client:
            seen = 0
            for i in range(8):
                body = {"model": service.model, "prompt": f"{i}", "max_tokens": 200, "stream": True}
                body |= {"return_token_ids": True, "ignore_eos": True}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            seen += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
                        if seen > 10 * (i + 1):
                            break
            return seen

    seen = asyncio.run(cancel_some())

    def grown(name: str) -> float:
        return of_ray(exporter).sum(f"specdec_{name}_total") - before.sum(f"specdec_{name}_total")

    eventually(lambda: grown("request_success") == 8, EXPORTED_S, "all eight have ended")

    def told() -> bool:
        """Routers and ingresses export on their own clocks, so one may be a second behind the other."""
        return grown("committed_tokens") >= grown("generation_tokens") + grown("discarded_tokens") >= seen

    eventually(told, EXPORTED_S, "no more than was decided, no fewer than clients counted")
