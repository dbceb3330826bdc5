"""Load that comes and goes under ranges of replicas: how many there were when, and what became of the streams.

``python -m tests.integration.scaling`` prints a table; the suite asserts its counts. Steps are emulated, so that
streams last while replicas start. The ingresses have few slots, so that a few dozen streams wait for them, while the
targets' caches have room: replicas come because users wait.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.integration.kills import Comparison, Stream, Streams
from tests.integration.running import RunningService, eventually
from tests.integration.updates import status_of_a_request

DRAFTS = ("--num-speculative-tokens", "4")
CACHE = ("--max-model-len", "1024", "--target-kv-cache-memory", "256MiB")
"""Of the demo target: room for 10,800 tokens."""
SLOTS = "--limits-max-concurrent-requests=16"
DELAYS = "upscale_delay_s: 1, downscale_delay_s: 20"
STAGGER_S = 0.5
SHORT_TOKENS, LONG_TOKENS = 220, 900
NUM_SHORT, NUM_LONG = 12, 2
"""Streams that differ. The long ones fit into one cache together."""
TIMEOUT_S = 180.0


@dataclass
class Outcome:
    """What load that came and went has led to.

    Attributes:
        seconds: From its cause to each event, by name.
        most_targets: That were there at once.
        least_targets: That were left while the long streams ran.
        compared: All streams against their undisturbed runs.
        statuses: Of short requests that were sent all the while.
        num_handed_over: Sequences that routers took from workers that drain.
        changes: The numbers of targets and of ingresses, one after another, each time that one changed.
        num_drafts: Drafts that were verified, for the streams under load and for the one after the pool was at zero.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    most_targets: int = 0
    least_targets: int = 0
    compared: Comparison | None = None
    statuses: Counter[int | None] = field(default_factory=Counter)
    num_handed_over: float = 0.0
    changes: dict[str, list[int]] = field(default_factory=lambda: {"target": [], "ingress": []})
    num_drafts: tuple[float, float] = (0.0, 0.0)


def start(most_targets: int) -> RunningService:
    """A service of one target and no draft, which may grow."""
    ranges = (
        f"--replicas-target={{min: 1, max: {most_targets}, {DELAYS}}}",
        f"--replicas-draft={{min: 0, max: 1, {DELAYS}}}",
        f"--replicas-ingress={{min: 1, max: 2, {DELAYS}}}",
    )
    slow = ("--backend", "benchmarks.backends:stand_in:target=300,draft=20")
    return RunningService(*DRAFTS, *CACHE, SLOTS, *ranges, *slow)


def linked(service: RunningService, kind: str) -> int:
    """Workers of a kind that the router is linked to."""
    found = [v for k, v in service.metrics().items() if k.startswith("specdec_router_workers{") and f'"{kind}"' in k]
    return int(max(found, default=0.0))


def ingresses(service: RunningService) -> int:
    """Ingresses whose metrics there are."""
    return sum(name.startswith("specdec_slots_used_share{") for name in service.metrics())


def undisturbed() -> dict[int, Stream]:
    """Every stream by its number, as a service gives it whose replicas are fixed."""
    service = RunningService(*DRAFTS, *CACHE)
    try:
        short, long = _streams(service)
        with ThreadPoolExecutor(8) as pool:
            return dict(pool.map(lambda i: (i, (short if i < NUM_SHORT else long).run(i)), range(NUM_SHORT + NUM_LONG)))
    finally:
        service.stop()


def under_load(service: RunningService, expected: dict[int, Stream], most_targets: int, at_once: int) -> Outcome:
    """Many short streams until all targets are there, then a few long ones alone, then nothing, then one."""
    outcome, ran = Outcome(), list[tuple[int, Stream]]()
    short, long = _streams(service)
    with _watched(service, outcome), _short_requests(service, outcome), ThreadPoolExecutor(NUM_LONG) as pool:
        with _load(short, at_once, ran):
            outcome.seconds["load to the first draft"] = _until(lambda: linked(service, "drafter") == 1, "a draft")
            more = _until(lambda: linked(service, "target") == most_targets, "all targets are there")
            outcome.seconds["load to all targets"] = outcome.seconds["load to the first draft"] + more
            outcome.most_targets = linked(service, "target")
            going = [pool.submit(long.run, i) for i in range(NUM_SHORT, NUM_SHORT + NUM_LONG)]
            _until(lambda: min(long.num_chunks.get(NUM_SHORT + i, 0) for i in range(NUM_LONG)) >= 2, "all have begun")
        ended_s = time.monotonic()
        while any(not stream.done() for stream in going):
            outcome.least_targets = linked(service, "target")
            if outcome.least_targets == 1:
                outcome.seconds.setdefault("end of load to one target", time.monotonic() - ended_s)
            time.sleep(0.2)
        ran += [(NUM_SHORT + i, stream.result()) for i, stream in enumerate(going)]
        outcome.seconds["end of load to one ingress"] = _until(lambda: ingresses(service) == 1, "one ingress")
    outcome.num_handed_over, before = service.count("handed_over"), service.count("spec_decode_num_drafts")
    outcome.seconds["end of streams to no draft"] = _until(lambda: linked(service, "drafter") == 0, "no draft")
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(short.run, 0)
        outcome.seconds["one stream to the draft's return"] = _until(lambda: linked(service, "drafter") == 1, "a draft")
        ran.append((0, alone.result()))
    outcome.num_drafts = before, service.count("spec_decode_num_drafts") - before
    outcome.compared = Comparison.of([stream for _, stream in ran], [expected[i] for i, _ in ran])
    return outcome


def _streams(service: RunningService) -> tuple[Streams, Streams]:
    return tuple(Streams(service.url, service.model, max_tokens=n) for n in (SHORT_TOKENS, LONG_TOKENS))  # type: ignore


def _until(condition: Callable[[], bool], what: str) -> float:
    def look() -> bool:
        time.sleep(0.25)
        return condition()

    return eventually(look, TIMEOUT_S, what)


@contextmanager
def _load(streams: Streams, at_once: int, ran: list[tuple[int, Stream]]) -> Iterator[None]:
    """So many streams at any time, until the end; those that run then go on to theirs."""
    is_over = threading.Event()

    def one_after_the_other(first: int) -> None:
        time.sleep(first * STAGGER_S)  # else all would end in the same moment, and nobody would wait for a while
        i = first
        while not is_over.is_set():
            ran.append((i % NUM_SHORT, streams.run(i % NUM_SHORT)))
            i += at_once

    with ThreadPoolExecutor(at_once) as pool:
        running: list[Future[None]] = [pool.submit(one_after_the_other, i) for i in range(at_once)]
        try:
            yield
        finally:
            is_over.set()
    for one in running:
        one.result()


@contextmanager
def _watched(service: RunningService, outcome: Outcome) -> Iterator[None]:
    """Note every change of the numbers of targets and ingresses."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.5):
            for part, number in (("target", linked(service, "target")), ("ingress", ingresses(service))):
                if outcome.changes[part][-1:] != [number]:
                    outcome.changes[part].append(number)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _short_requests(service: RunningService, outcome: Outcome) -> Iterator[None]:
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            outcome.statuses[status_of_a_request(service.url)] += 1
            time.sleep(0.2)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the times, and what became of the streams."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--targets", type=int, default=2, help="at most")
    parser.add_argument("--at-once", type=int, default=32, help="short streams at any time")
    options = parser.parse_args(arguments)
    expected = undisturbed()
    service = start(options.targets)
    try:
        outcome = under_load(service, expected, options.targets, options.at_once)
    finally:
        service.stop()
    print("| from | s |\n|---|---|")
    for name, seconds in outcome.seconds.items():
        print(f"| {name} | {seconds:.1f} |")
    compared = outcome.compared
    assert compared is not None
    print(f"targets: 1 to {outcome.most_targets} to {outcome.least_targets}")
    print("; ".join(f"{part}: {', '.join(map(str, numbers))}" for part, numbers in outcome.changes.items()))
    print(f"sequences handed over: {outcome.num_handed_over:.0f}; drafts verified: {outcome.num_drafts}")
    counts = {what: len(getattr(compared, what)) for what in ("broken", "lost", "doubled", "changed")}
    print(f"tokens compared: {compared.num_tokens}; streams by what became of them: {counts}")
    print(f"short requests by status: {dict(outcome.statuses)}")


if __name__ == "__main__":
    main()
