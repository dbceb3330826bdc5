"""Streams against a running service, and when their tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the service in one run.

    Attributes:
        prompts: One per stream; they run all at once.
        max_tokens: Output tokens of each; end-of-sequence tokens are ignored, so that all runs do the same work.
        temperature: Of every request; each has a seed of its own.
        num_speculative_tokens: Draft tokens per round; 0 is the target alone, None the service's default.
    """

    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    num_speculative_tokens: int | None


@dataclass(frozen=True, slots=True)
class Stream:
    """What one stream gave.

    Attributes:
        text: All of it.
        num_tokens: Output tokens, as the service bills them.
        first_s: Time to the first token.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens kept.
    """

    text: str
    num_tokens: int
    first_s: float
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload."""

    streams: tuple[Stream, ...]
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all streams per second."""
        return sum(stream.num_tokens for stream in self.streams) / self.duration_s

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 where nothing was drafted."""
        drafted = sum(stream.num_draft_tokens for stream in self.streams)
        return sum(stream.num_accepted_tokens for stream in self.streams) / drafted if drafted else 0.0

    @property
    def texts(self) -> tuple[str, ...]:
        """The streams' texts, in the order of their prompts."""
        return tuple(stream.text for stream in self.streams)


async def run_workload(url: str, model: str, workload: Workload) -> Run:
    """Run all streams of a workload at once.

    Args:
        url: Of the service, without a path.
        model: Name of the model, as the service lists it.
        workload: What is asked.

    Raises:
        httpx.HTTPError: The service cannot be reached, or refuses a request.
    """
    limits = httpx.Limits(max_connections=len(workload.prompts))
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        started_s = time.perf_counter()
        asked = [_stream(client, model, workload, index) for index in range(len(workload.prompts))]
        streams = await asyncio.gather(*asked)
        return Run(tuple(streams), time.perf_counter() - started_s)


async def served_model(url: str) -> str:
    """Name of the first model a service lists."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        answer = (await client.get("/v1/models")).raise_for_status()
        return str(answer.json()["data"][0]["id"])


async def _stream(client: httpx.AsyncClient, model: str, workload: Workload, index: int) -> Stream:
    body = {
        "model": model,
        "prompt": workload.prompts[index],
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "per_request_spec_decode_metrics": "summary",
    }
    if workload.num_speculative_tokens is not None:
        body["num_speculative_tokens"] = workload.num_speculative_tokens
    started_s, first_s, pieces, last = time.perf_counter(), 0.0, [], {}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line.removeprefix("data: "))
            if last["choices"]:
                first_s = first_s or time.perf_counter() - started_s
                pieces.append(last["choices"][0]["text"])
    speculative = (last.get("metrics") or {}).get("speculative_decoding") or {}
    return Stream(
        "".join(pieces),
        last["usage"]["completion_tokens"],
        first_s,
        speculative.get("num_draft_tokens", 0),
        speculative.get("num_accepted_draft_tokens", 0),
    )
