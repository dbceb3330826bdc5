"""Goodput of a service that is asked for more than it takes, beside its peak.

    specdec serve --emulate-step-ms target=30,draft=3 --scripted-acceptance-rate 0.8 --limits-max-concurrent-requests 64
    python -m tests.bench.overload http://127.0.0.1:8000 [--clients 16,64,256] [--runs 5] [--seconds 20]

Each client sends a request, reads its stream to the end, and sends the next; refused, it waits as ``Retry-After`` says.
Goodput is tokens per second of answers that came whole. Beside each number of clients stand the refusals by status, and
how many polls of ``/health`` were answered with 200, of how many. Figures are medians over the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import httpx


@dataclass
class Load:
    """What became of one run.

    Attributes:
        num_tokens: Of answers that came whole.
        refusals: Answers that are errors, by status; 0 is a connection that failed, or a stream without its end.
        num_healthy: Polls of ``/health`` that were answered with 200.
        num_polls: All of them.
    """

    duration_s: float
    num_tokens: int = 0
    refusals: Counter[int] = field(default_factory=Counter)
    num_healthy: int = 0
    num_polls: int = 0

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.duration_s


async def measure(url: str, num_clients: int, duration_s: float, max_tokens: int) -> Load:
    """Load a service with so many clients for so long.

    Args:
        url: Of the service.
        num_clients: Requests that are sent, or waited for, at once.
        duration_s: New requests are sent for so long; those that run then still count.
        max_tokens: Of each answer.
    """
    load = Load(duration_s)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        until_s = time.monotonic() + duration_s
        asked = {"model": model, "prompt": "def f(x):", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        polling = asyncio.create_task(_poll(http, load))
        await asyncio.gather(*(_client(http, asked, load, until_s) for _ in range(num_clients)))
        polling.cancel()
        load.duration_s += time.monotonic() - until_s
    return load


async def _client(http: httpx.AsyncClient, asked: dict[str, object], load: Load, until_s: float) -> None:
    while time.monotonic() < until_s:
        try:
            async with http.stream("POST", "/v1/completions", json=asked | {"return_token_ids": True}) as answer:
                if answer.is_success:
                    num_tokens = await _tokens(answer)
                    load.num_tokens += num_tokens
                    load.refusals[0] += num_tokens == 0
                    continue
                await answer.aread()
                load.refusals[answer.status_code] += 1
                await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
        except httpx.HTTPError:
            load.refusals[0] += 1


async def _tokens(answer: httpx.Response) -> int:
    """Tokens of a stream that came to its end; else 0."""
    num_tokens, is_whole = 0, False
    async for line in answer.aiter_lines():
        is_whole = is_whole or line == "data: [DONE]"
        if line.startswith("data: {"):
            choices = json.loads(line.removeprefix("data: ")).get("choices", ())
            num_tokens += sum(len(choice.get("token_ids") or ()) for choice in choices)
    return num_tokens if is_whole else 0


async def _poll(http: httpx.AsyncClient, load: Load) -> None:
    while True:
        with suppress(httpx.HTTPError):
            load.num_healthy += (await http.get("/health", timeout=5)).status_code == 200
        load.num_polls += 1
        await asyncio.sleep(0.5)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", default="16,64,256")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    clients = [int(number) for number in arguments.clients.split(",")]
    loads: dict[int, list[Load]] = {number: [] for number in clients}
    for _ in range(arguments.runs):
        for number in clients:
            run = asyncio.run(measure(arguments.url, number, arguments.seconds, arguments.max_tokens))
            loads[number].append(run)
    goodput = {number: statistics.median(load.goodput for load in runs) for number, runs in loads.items()}
    print("| clients | tokens/s | of the peak | refusals | /health |\n|---|---|---|---|---|")
    for number, runs in loads.items():
        refusals = sum((load.refusals for load in runs), Counter())
        told = ", ".join(f"{count} x {status}" for status, count in sorted(refusals.items()) if count) or "none"
        healthy = f"{sum(load.num_healthy for load in runs)} of {sum(load.num_polls for load in runs)}"
        share = goodput[number] / max(max(goodput.values()), 1e-9)
        print(f"| {number} | {goodput[number]:.0f} | {share:.2f} | {told} | {healthy} |")


if __name__ == "__main__":
    main()
