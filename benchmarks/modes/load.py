"""Streams against a running service, when their tokens came, and what its workers did meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from dataclasses import dataclass
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.modes.measures import DeviceUse, Run, Stream, TokenArrival
from specdec.engine.results import SpecStats

DEVICES = {"TargetServer": "target", "DraftServer": "draft"}
"""Devices by the ``deployment`` of their workers' samples."""
_FIGURES = {
    "busy_seconds_total": "busy_s",
    "steps_total": "num_steps",
    "backend": "",
}
"""What is read, by the names of the series; of ``backend`` the label ``name`` says what it is."""
_COUNTS = ("busy_s", "num_steps", "num_emulated_steps", "num_overruns")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked in one run.

    Attributes:
        prompts: One per stream; they run all at once, and none is found in a cache.
        max_tokens: Output tokens of each; end-of-sequence tokens are ignored, so that all runs do the same work.
        temperature: Of every request; each has a seed of its own.
        num_speculative_tokens: Draft tokens per round; 0 is the target alone, None the service's default.
        first_seed: Of the first request; the others count on from there.
    """

    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    num_speculative_tokens: int | None
    first_seed: int = 0


def fresh_salt() -> str:
    """A cache salt that nothing before had, for a request whose prompt is to be read, not found in a cache."""
    return secrets.token_hex(16)


async def run_workload(url: str, model: str, workload: Workload) -> Run:
    """Run all streams of a workload at once.

    Args:
        url: Of the service, without a path.
        model: Name of the model, as the service lists it.
        workload: What is asked.

    Raises:
        httpx2.HTTPError: The service cannot be reached, or refuses a request.
    """
    limits = httpx2.Limits(max_connections=len(workload.prompts) + 1)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        before = await scrape(client)
        started_s = time.perf_counter()
        asked = [_stream(client, model, workload, index) for index in range(len(workload.prompts))]
        streams = await asyncio.gather(*asked)
        duration_s = time.perf_counter() - started_s
        after = await scrape(client)
    return Run(tuple(streams), duration_s, os.getloadavg()[0], devices_between(before, after, duration_s))


async def served_model(url: str) -> str:
    """Name of the first model a service lists."""
    async with httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        answer = (await client.get("/v1/models")).raise_for_status()
        return str(answer.json()["data"][0]["id"])


Figures = dict[str, dict[str, float]]
"""What workers report, by device and figure, summed over a device's workers, and how many (``num_workers``)."""


async def scrape(client: httpx2.AsyncClient) -> Figures:
    """The workers' figures on a service's ``/metrics``; those it does not have are left out."""
    answer = await client.get("/metrics")
    return worker_figures(answer.text) if answer.is_success else {}


async def service_stand_ins(url: str) -> tuple[str, ...]:
    """What a running service's metrics tell of emulated devices and scripted tokens, for the head of a table."""
    async with httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        return reported_stand_ins(await scrape(client))


def reported_stand_ins(figures: Figures) -> tuple[str, ...]:
    """The same from figures."""
    emulated = [device for device, found in figures.items() if found.get("num_emulated_steps")]
    scripted = any(found.get("is_scripted") for found in figures.values())
    notes = [f"emulated devices: {', '.join(sorted(emulated))}"] if emulated else []
    return tuple([*notes, "scripted tokens"] if scripted else notes)


def worker_figures(page: str) -> Figures:
    """Read the workers' figures from a page in Prometheus' text format."""
    figures: Figures = {}
    workers: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = _FIGURES.get(sample.name.removeprefix("specdec_"))
            name = sample.labels["name"] if name == "" else name
            device = DEVICES.get(sample.labels.get("deployment", ""))
            if device is not None and name is not None:
                found = figures.setdefault(device, {})
                found[name] = found.get(name, 0.0) + sample.value
                workers.setdefault(device, set()).add(sample.labels["replica"])
    for device, names in workers.items():
        figures[device]["num_workers"] = float(len(names))
    return figures


def devices_between(before: Figures, after: Figures, duration_s: float) -> dict[str, DeviceUse]:
    """What each device did between two scrapes; nothing for a device that does not tell how long it was busy.

    Args:
        before: Figures of a service at rest.
        after: The same after a run of ``duration_s``.
        duration_s: The time that the share of is asked for.
    """
    uses: dict[str, DeviceUse] = {}
    for device, last in sorted(after.items()):
        if "busy_s" not in last or "num_steps" not in last:
            continue
        since = {name: last.get(name, 0.0) - before.get(device, {}).get(name, 0.0) for name in _COUNTS}
        uses[device] = DeviceUse(
            duration_s,
            since["busy_s"],
            round(since["num_steps"]),
            round(since["num_emulated_steps"]),
            round(since["num_overruns"]),
            num_workers=round(last.get("num_workers", 1.0)),
        )
    return uses


async def _stream(client: httpx2.AsyncClient, model: str, workload: Workload, index: int) -> Stream:
    body = {
        "model": model,
        "prompt": workload.prompts[index],
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "seed": workload.first_seed + index,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "per_request_spec_decode_metrics": "summary",
        "cache_salt": fresh_salt(),
    }
    if workload.num_speculative_tokens is not None:
        body["num_speculative_tokens"] = workload.num_speculative_tokens
    started_s = time.perf_counter()
    arrivals: list[TokenArrival] = []
    pieces: list[str] = []
    last: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line.removeprefix("data: "))
            for choice in last.get("choices", ()):
                if choice.get("token_ids"):
                    arrivals.append(TokenArrival(time.perf_counter() - started_s, len(choice["token_ids"])))
                pieces.append(choice["text"])
    if "error" in last or not arrivals:
        raise httpx2.HTTPError(f"a stream ended without its tokens: {last.get('error', 'none came')}")
    counts = (last.get("metrics") or {}).get("speculative_decoding") or {}
    return Stream(
        "".join(pieces),
        tuple(arrivals),
        SpecStats(
            num_drafts=counts.get("num_spec_steps", 0),
            num_draft_tokens=counts.get("num_draft_tokens", 0),
            num_accepted_tokens=counts.get("num_accepted_draft_tokens", 0),
        ),
    )
