"""One poisonous request beside seeded streams: how it ends, and what became of the others.

``python -m tests.integration.poison`` prints a row for each kind of poison; the suite asserts the counts.

The poison is a hook on the logits that goes by the bias of a request. From its fifth token on it raises, or runs out of
memory; or it ends the process it runs in each time the request is decoded.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import torch

from specdec.core.params import SequenceSpec
from tests.integration.kills import Comparison, Stream, Streams, processes_of
from tests.integration.running import RunningService, eventually
from tests.specdec.hooks import by_row

KINDS = {"raise": 4001, "memory": 4002, "die": 4003}
"""What a poisonous request does, and the token whose bias asks for it."""

HOOK = "tests.integration.poison:hook"
NUM_HARMLESS_TOKENS = 4
PATIENCE_S = 240.0


@by_row
def hook(spec: SequenceSpec, tokens: list[int], logits: torch.Tensor) -> None:
    """A logits processor that does what a request's bias asks for.

    Raises:
        ValueError: It asks for ``raise``.
        torch.OutOfMemoryError: It asks for ``memory``.
    """
    asked = {token for token, _ in spec.sampling.logit_bias}
    if KINDS["die"] in asked:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(tokens) < spec.output_start + NUM_HARMLESS_TOKENS:
        return
    if KINDS["raise"] in asked:
        raise ValueError("this hook raises")
    if KINDS["memory"] in asked:
        raise torch.OutOfMemoryError("no memory is left for this row")


@dataclass
class Outcome:
    """What a poisonous request and its neighbours came to.

    Attributes:
        status: HTTP status of the poisonous request; None where its connection broke or it was never answered.
        answer: Its body.
        error: Its OpenAI error object.
        ended_s: Seconds until it had its answer.
        deaths: Replicas that ended meanwhile, by kind.
        compared: The other streams against their undisturbed runs.
    """

    status: int | None = None
    answer: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    ended_s: float = 0.0
    deaths: dict[str, int] = field(default_factory=dict)
    compared: Comparison | None = None


def start(*flags: str) -> RunningService:
    """The demo pair with the hook, whose drafts do not depend on the controller."""
    return RunningService("--num-speculative-tokens", "4", "--logits-processors", HOOK, *flags)


def poison(service: RunningService, streams: Streams, undisturbed: Sequence[Stream], kind: str) -> Outcome:
    """Send one poisonous request once all streams have begun, and wait for everybody."""
    body = {
        "model": service.model,
        "prompt": "def poison():\n",
        "max_tokens": 40,
        "temperature": 1,
        "seed": 1,
        "ignore_eos": True,
        "logit_bias": {str(KINDS[kind]): 0.5},
    }
    return beside(service, streams, undisturbed, body)


def beside(service: RunningService, streams: Streams, undisturbed: Sequence[Stream], body: dict[str, Any]) -> Outcome:
    """Send one request once all streams have begun, and wait for everybody."""
    outcome = Outcome()
    with _deaths(service) as deaths:
        with streams.running() as wait:
            eventually(streams.have_begun, 120, "all streams have begun")
            sent_s = time.monotonic()
            try:
                answer = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
                outcome.status, outcome.answer = answer.status_code, answer.json()
                outcome.error = outcome.answer.get("error", {})
            except httpx2.HTTPError as error:
                outcome.error = {"message": repr(error)}
            outcome.ended_s = time.monotonic() - sent_s
            outcome.compared = Comparison.of(wait(), undisturbed)
        eventually(service.is_ready, 120, "the service is ready again")
    outcome.deaths = deaths
    return outcome


@contextmanager
def _deaths(service: RunningService) -> Any:
    """Counts replicas that end while it is entered, by kind."""
    kinds = ("target", "draft", "router", "ingress")
    first = {kind: {process.pid for process in processes_of(service, kind)} for kind in kinds}
    seen = {kind: set(pids) for kind, pids in first.items()}
    counts = dict.fromkeys(kinds, 0)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            for kind in kinds:
                seen[kind] |= {process.pid for process in processes_of(service, kind)}

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield counts
    finally:
        done.set()
        watcher.join()
        for kind in kinds:
            counts[kind] = len(seen[kind] - {process.pid for process in processes_of(service, kind)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each kind of poison, over three runs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args(arguments)
    service = start()
    try:
        streams = Streams(service.url, service.model, options.streams, options.max_tokens)
        with streams.running() as wait:
            undisturbed = wait()
        print("| poison | status | error | ended after, s | replicas that died | streams broken | changed |")
        print("|---|---|---|---|---|---|---|")
        for kind in KINDS:
            runs = [poison(service, streams, undisturbed, kind) for _ in range(options.runs)]
            print(_row(kind, runs), flush=True)
    finally:
        service.stop()


def _row(kind: str, runs: Sequence[Outcome]) -> str:
    compared = [run.compared for run in runs if run.compared is not None]
    deaths = "; ".join(" ".join(f"{k} {n}" for k, n in run.deaths.items() if n) or "none" for run in runs)
    cells = [
        kind,
        ", ".join(str(run.status) for run in runs),
        str(runs[-1].error.get("message", "")),
        f"{statistics.median(run.ended_s for run in runs):.1f}",
        deaths,
        str(sum(len(one.broken) for one in compared)),
        str(sum(len(one.lost) + len(one.doubled) + len(one.changed) for one in compared)),
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
