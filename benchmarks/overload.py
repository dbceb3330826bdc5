"""Goodput of a service that is asked for more than it takes, beside its peak; and its health when nobody reads.

``python -m benchmarks.overload [--clients 16,64,256] [--runs 5] [--seconds 10]`` starts a service on emulated devices
that takes 64 sequences, and lets 64 requests wait. Each client sends a request, reads its stream to the end, and sends
the next; refused, it waits as ``Retry-After`` says. Goodput is tokens per second of answers that came whole; figures
are medians over the runs. Then as many clients as there are places open a long stream each and read nothing of it for
a while, and others are refused; at last all of them read.

The exit code is 1 where an admitted request did not end, a refusal had no body or no ``Retry-After``, more ran than is
allowed, or a poll of ``/health`` was not answered with 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx

from tests.integration.running import RunningService

DEVICES = ("--backend", "benchmarks.backends:stand_in:target=30,draft=3,acceptance=0.8")
LONG_TOKENS = 1900
POLL_S = 0.5


@dataclass
class Load:
    """What became of one run.

    Attributes:
        duration_s: Until the last answer's end.
        num_tokens: Of answers that came whole.
        num_whole: Those answers.
        num_broken: Connections that failed, and streams without their end.
        refusals: Answers that are errors, by status.
        num_bare: Of these, those without an OpenAI error body, or without ``Retry-After``.
        most_running: Most sequences that ran at once, by ``/metrics``.
        num_healthy: Polls of ``/health`` that were answered with 200.
        num_polls: All of them.
    """

    duration_s: float = 0.0
    num_tokens: int = 0
    num_whole: int = 0
    num_broken: int = 0
    refusals: Counter[int] = field(default_factory=Counter)
    num_bare: int = 0
    most_running: int = 0
    num_healthy: int = 0
    num_polls: int = 0

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.duration_s

    def faults(self, most_running: int) -> list[str]:
        """What must not be, in words; nothing if all is well."""
        counts = {
            "requests that did not end": self.num_broken,
            "refusals without a body or Retry-After": self.num_bare,
            "polls of /health without 200": self.num_polls - self.num_healthy,
            "sequences beyond the limit": max(0, self.most_running - most_running),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


async def measure(url: str, num_clients: int, duration_s: float, max_tokens: int) -> Load:
    """Load a service with so many clients for so long.

    Args:
        url: Of the service.
        num_clients: Requests that are sent, or waited for, at once.
        duration_s: New requests are sent for so long; those that run then still count.
        max_tokens: Of each answer.
    """
    load = Load()
    async with polled(url, load) as http:
        asked = await _asked(http, max_tokens)
        started_s = time.monotonic()
        clients = (_client(http, asked, load, started_s + duration_s) for _ in range(num_clients))
        await asyncio.gather(*clients)
        load.duration_s = time.monotonic() - started_s
    return load


async def stall(url: str, num_readers: int, duration_s: float, max_tokens: int, num_others: int) -> Load:
    """Open streams, read nothing of them for a while, and then all of them; others ask meanwhile, once each.

    Args:
        url: Of the service.
        num_readers: The streams.
        duration_s: Nothing is read for so long.
        max_tokens: Of each stream; enough for it not to end before it is read.
        num_others: Clients that ask beside.
    """
    load = Load()
    async with polled(url, load) as http:
        asked = await _asked(http, max_tokens)
        started_s = time.monotonic()
        requests = [http.build_request("POST", "/v1/completions", json=asked) for _ in range(num_readers)]
        opened = await asyncio.gather(*(http.send(request, stream=True) for request in requests))
        others = [asyncio.create_task(_client(http, asked | {"max_tokens": 1}, load, 0)) for _ in range(num_others)]
        await asyncio.sleep(duration_s)
        await asyncio.gather(*(_answer(answer, load) for answer in opened))
        await asyncio.gather(*others)
        load.duration_s = time.monotonic() - started_s
    return load


@asynccontextmanager
async def polled(url: str, load: Load) -> AsyncIterator[httpx.AsyncClient]:
    """A client for load, while ``/health`` and ``/metrics`` are polled by another."""
    no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=no_limit) as http,
        httpx.AsyncClient(base_url=url, timeout=10) as polls,
    ):
        polling = asyncio.create_task(_poll(polls, load))
        try:
            yield http
        finally:
            polling.cancel()


async def _asked(http: httpx.AsyncClient, max_tokens: int) -> dict[str, object]:
    model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    asked = {"model": model, "prompt": "def f(x):", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return asked | {"return_token_ids": True}


async def _client(http: httpx.AsyncClient, asked: dict[str, object], load: Load, until_s: float) -> None:
    """Ask, and ask again until then; at least once."""
    while True:
        wait_s = 0.0
        try:
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                await _answer(answer, load)
            if not answer.is_success:
                wait_s = float(answer.headers.get("retry-after", 1))
        except httpx.HTTPError:
            load.num_broken += 1
        if time.monotonic() >= until_s:
            return
        await asyncio.sleep(wait_s)


async def _answer(answer: httpx.Response, load: Load) -> None:
    """Read one to its end."""
    if not answer.is_success:
        await answer.aread()
        load.refusals[answer.status_code] += 1
        load.num_bare += not _has_body(answer)
        return
    num_tokens, is_whole = 0, False
    async for line in answer.aiter_lines():
        is_whole = is_whole or line == "data: [DONE]"
        if line.startswith("data: {"):
            choices = json.loads(line.removeprefix("data: ")).get("choices", ())
            num_tokens += sum(len(choice.get("token_ids") or ()) for choice in choices)
    load.num_whole += is_whole
    load.num_broken += not is_whole
    load.num_tokens += num_tokens if is_whole else 0


def _has_body(refusal: httpx.Response) -> bool:
    """Whether it says what it should: an error in OpenAI's form, and when to come again."""
    try:
        error = refusal.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return set(error) == {"message", "type", "param", "code"} and "retry-after" in refusal.headers


async def _poll(http: httpx.AsyncClient, load: Load) -> None:
    while True:
        is_healthy = False
        with suppress(httpx.HTTPError):
            is_healthy = (await http.get("/health")).status_code == 200
        load.num_polls += 1
        load.num_healthy += is_healthy
        page = ""
        with suppress(httpx.HTTPError):
            page = (await http.get("/metrics")).text
        running = [line for line in page.splitlines() if line.startswith("specdec_num_requests_running{")]
        load.most_running = max(load.most_running, sum(int(float(line.rpartition(" ")[2])) for line in running))
        await asyncio.sleep(POLL_S)


def table(loads: dict[str, Sequence[Load]]) -> str:
    """Markdown, a row for each kind of load."""
    goodput = {name: statistics.median(load.goodput for load in runs) for name, runs in loads.items()}
    lines = [
        "| load | tokens/s | of the peak | whole answers | refusals | most at once | /health |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in loads.items():
        refusals = sum((load.refusals for load in runs), Counter[int]())
        refused = ", ".join(f"{count} x {status}" for status, count in sorted(refusals.items())) or "none"
        healthy = f"{sum(load.num_healthy for load in runs)} of {sum(load.num_polls for load in runs)}"
        share = goodput[name] / max(max(goodput.values()), 1e-9)
        cells = [name, f"{goodput[name]:.0f}", f"{share:.2f}", sum(load.num_whole for load in runs), refused]
        cells += [max(load.most_running for load in runs), healthy]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, and print a table; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="16,64,256", help="numbers of clients (16,64,256)")
    parser.add_argument("--places", type=int, default=64, help="sequences that are taken, and as many may wait (64)")
    parser.add_argument("--runs", type=int, default=5, help="of each number of clients (5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a run (10)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (64)")
    parser.add_argument("--step-timeout-s", type=float, default=10.0, help="how long nobody reads, at the end (10)")
    given = parser.parse_args()
    limits = [f"--limits-max-{what}-requests={given.places}" for what in ("concurrent", "queued")]
    loads: dict[str, list[Load]] = {}
    service = RunningService(*DEVICES, *limits)
    try:
        asyncio.run(measure(service.url, given.places, 5, given.max_tokens))  # to warm up
        for _ in range(given.runs):
            for number in map(int, given.clients.split(",")):
                run = asyncio.run(measure(service.url, number, given.seconds, given.max_tokens))
                loads.setdefault(f"{number} clients", []).append(run)
                print(f"{number} clients: {run}", file=sys.stderr, flush=True)
        stalled = asyncio.run(stall(service.url, given.places, given.step_timeout_s, LONG_TOKENS, 2 * given.places))
    finally:
        service.stop()
    print(table(loads))
    print()
    print(table({f"{given.places} readers that stall": [stalled]}))
    faults = {fault for runs in [*loads.values(), [stalled]] for run in runs for fault in run.faults(given.places)}
    print("\n".join(sorted(faults)) or "every request ended, every refusal had its body, no limit was passed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
