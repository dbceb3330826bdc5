"""One trace a request, through proxy, ingress, router, target and drafter, as a real service writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.running import RunningService, eventually

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MACHINES = ("specdec.router", "specdec.target", "specdec.drafter")
SERVES = ("proxy_http_request", "route_to_replica", "replica_handle_request")
PHASES = ("specdec.queue", "specdec.prompt", "specdec.stream")
Span = dict[str, Any]


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """Traces what clients ask it to trace, and nothing else."""
    flags = ("--tracing-exporter", "file", "--tracing-sampling-ratio", "0")
    running = RunningService(*flags, "--num-speculative-tokens", "4", "--speculation-mode", "sequential")
    yield running
    assert running.stop() == 0


def spans(service: RunningService) -> list[Span]:
    """All that were written so far."""
    (folder,) = [line.split("logs: ")[1].strip() for line in service.lines if "logs: " in line]
    found, decoder = [], json.JSONDecoder()
    for file in Path(folder, "spans").glob("*_tracing.json"):
        text = file.read_text().strip()
        while text:
            span, end = decoder.raw_decode(text)
            found.append(span)
            text = text[end:].lstrip()
    return found


def complete(service: RunningService, **headers: str) -> dict[str, Any]:
    body = {"model": service.model, "prompt": "def fibonacci(n):", "max_tokens": 60, "temperature": 0}
    body |= {"ignore_eos": True, "per_request_spec_decode_metrics": "summary"}
    answer = httpx2.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    return dict(answer.json())


def test_a_request_is_one_trace_whose_sums_are_those_of_its_answer(service: RunningService) -> None:
    complete(service)
    answer = complete(service, traceparent=f"00-{TRACE}-{CLIENT}-01")
    expected = len(SERVES) + len(("specdec.ingress", *PHASES, *MACHINES))
    eventually(lambda: len(spans(service)) >= expected, 30, "all spans have ended")
    found = spans(service)
    assert {span["context"]["trace_id"] for span in found} == {f"0x{TRACE}"}, "nothing else was traced"
    names = [span["name"] for span in found]
    assert len(names) == len(set(names)), names
    named = {span["name"].split(" ")[0]: span for span in found}
    proxy, route, replica = (named[name] for name in SERVES)
    above = {
        "specdec.ingress": replica,
        "specdec.router": named["specdec.ingress"],
        "specdec.target": named["specdec.router"],
        "specdec.drafter": named["specdec.router"],
        **dict.fromkeys(PHASES, named["specdec.ingress"]),
    }
    assert set(named) == {*SERVES, *above}
    assert proxy["parent_id"] == f"0x{CLIENT}"
    assert route["parent_id"] == proxy["context"]["span_id"]
    assert replica["parent_id"] == route["context"]["span_id"]
    assert {name: named[name]["parent_id"] for name in above} == {
        name: span["context"]["span_id"] for name, span in above.items()
    }
    usage, metrics = answer["usage"], answer["metrics"]["speculative_decoding"]
    of = {
        name: {key.removeprefix("specdec."): value for key, value in span["attributes"].items()}
        for name, span in named.items()
    }
    drafted, accepted = metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]
    assert drafted > accepted > 0
    target, ingress = of["specdec.target"], of["specdec.ingress"]
    assert (target["num_tokens"], target["num_draft_tokens"], target["num_accepted_tokens"]) == (60, drafted, accepted)
    assert target["num_rounds"] == 60 - accepted, "a round decides one token more than it accepts"
    assert target["finish"] == ingress["finish"] == "length"
    assert (ingress["prompt_tokens"], ingress["completion_tokens"]) == (usage["prompt_tokens"], 60)
    assert (ingress["draft_tokens"], ingress["accepted_tokens"], ingress["status"]) == (drafted, accepted, 200)
    router, drafter = of["specdec.router"], of["specdec.drafter"]
    assert (router["num_tokens"], router["num_target_openings"], router["num_drafter_openings"]) == (60, 1, 1)
    assert drafter["num_proposed_tokens"] >= drafted
    assert accepted - 4 <= drafter["num_kept_tokens"] <= accepted, "nobody tells a drafter of the last round"
    for name in ("specdec.target", "specdec.drafter"):
        assert of[name]["step_us"] > 0, name
    assert len({of[name]["replica"] for name in MACHINES}) == len(MACHINES)
    assert len({of[name]["seq"] for name in MACHINES}) == 1
