"""Streams while their service is told to stop: who ended, and what new requests were told.

``python -m tests.integration.drains`` prints a table; the suite asserts its counts.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from tests.integration.kills import Comparison, Streams, start
from tests.integration.running import RunningService, eventually


@dataclass(frozen=True)
class Refusal:
    """What a new request was told.

    Attributes:
        status: HTTP status; None where the connection was refused or cut.
        retry_after: The header.
        code: Of the OpenAI error body; None where there is no such body.
    """

    status: int | None
    retry_after: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Drained:
    """What became of a service that was told to stop under streams.

    Attributes:
        compared: The streams against their undisturbed runs.
        told: What requests were told that came after the signal, while streams ran.
        told_last: What requests were told after the last stream had ended, until nobody listened any more.
        exit_code: Of the service.
        took_s: From the signal to the end of the service.
    """

    compared: Comparison
    told: tuple[Refusal, ...]
    told_last: tuple[Refusal, ...]
    exit_code: int
    took_s: float


def ask(service: RunningService) -> Refusal:
    """Send one short request."""
    body = {"model": "specdec-demo", "prompt": "x", "max_tokens": 1}
    try:
        answer = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=30, trust_env=False)
    except httpx2.HTTPError:
        return Refusal(None)
    try:
        code = answer.json()["error"]["code"]
    except (ValueError, KeyError):
        code = None
    return Refusal(answer.status_code, answer.headers.get("retry-after"), code)


def under_sigterm(service: RunningService, streams: Streams) -> Drained:
    """Run all streams, tell the service to stop once all have begun, and ask for more until they have ended."""
    with streams.running() as wait:
        undisturbed = wait()
    told = []
    with streams.running() as wait:
        eventually(streams.have_begun, 120, "all streams have begun")
        signalled_s = time.monotonic()
        service.signal(signal.SIGTERM)
        eventually(lambda: any("stopping" in line for line in service.lines), 30, "the service has heard")
        eventually(lambda: ask(service).status != 200, 30, "new requests are refused")
        while streams.are_running():
            told.append(ask(service))
            time.sleep(0.2)
        ended = wait()
    told_last = []
    while (refusal := ask(service)).status is not None:
        told_last.append(refusal)
        time.sleep(0.05)
    code = service.wait()
    took_s = time.monotonic() - signalled_s
    return Drained(Comparison.of(ended, undisturbed), tuple(told), tuple(told_last), code, took_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what became of the streams of a service that was told to stop; each run has a service of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1, help="of each deployment")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=600)
    options = parser.parse_args(arguments)
    runs = []
    for _ in range(options.runs):
        service = start(options.replicas)
        runs.append(under_sigterm(service, Streams(service.url, service.model, options.streams, options.max_tokens)))
    pauses = [run.compared.longest_pause_s for run in runs]
    print("| SIGTERM under | broken | differ | refused as said | told otherwise | longest pause, s | to the end, s |")
    print("|---|---|---|---|---|---|---|")
    told = [refusal for run in runs for refusal in run.told + run.told_last]
    refused = sum(refusal.status == 503 and refusal.code is not None for refusal in told)
    cells = [
        f"{options.streams} streams, {options.replicas} of each",
        sum(len(run.compared.broken) for run in runs),
        sum(not run.compared.is_exact for run in runs),
        refused,
        len(told) - refused,
        f"{statistics.median(pauses):.2f}",
        f"{statistics.median(run.took_s for run in runs):.1f}",
    ]
    print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
