"""Seeded streams under kills: who can be killed, and what became of the streams.

``python -m tests.integration.kills`` prints the kill table; the suite asserts its counts.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import httpx2
import psutil

from tests.integration.running import RunningService, eventually

VICTIMS = {
    "draft": ":DraftServer",
    "target": ":TargetServer",
    "router": ":SpeculationRouter",
    "ingress": ":OpenAIIngress",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
}
"""What can be killed in a running service, and how its process is called."""

TAKE_CONNECTIONS = ("ingress", "proxy")
"""Whose death breaks the streams that pass through them; no other stream may break."""

STREAM_TIMEOUT_S = 240.0


def processes_of(service: RunningService, victim: str) -> list[psutil.Process]:
    """The running processes of a kind, oldest first; none of a replica that is starting."""
    found = []
    called = VICTIMS[victim]
    for child in service.children():
        try:
            title = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::") and called in title:
            found.append(child)
    return sorted(found, key=lambda process: process.create_time())


@dataclass
class Stream:
    """One seeded stream, as its client sees it.

    Attributes:
        text: What came.
        num_tokens: Completion tokens by the last chunk's usage; None where the stream broke.
        longest_pause_s: Longest time without a chunk.
        error: Why it broke; None where it ended as it should.
        logprobs: Of its tokens, where they are asked for.
    """

    text: str = ""
    num_tokens: int | None = None
    longest_pause_s: float = 0.0
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Streams:
    """Seeded streams that run at once, half at temperature 0 and half at 1.

    Args:
        url: Of the service.
        model: Its name in the API.
        count: How many.
        max_tokens: Of each; end-of-sequence tokens are ignored.
        fields: Others of the body.
        headers: Of each request.
        kinds: More fields: stream ``i`` has those of ``kinds[i % len(kinds)]``.
    """

    url: str
    model: str
    count: int = 16
    max_tokens: int = 400
    fields: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[Mapping[str, object]] = ({},)
    num_chunks: dict[int, int] = field(default_factory=dict)
    _futures: list[Future[Stream]] = field(default_factory=list)

    def body(self, i: int) -> dict[str, Any]:
        """What stream ``i`` asks for."""
        return {
            "model": self.model,
            "prompt": f"def function_{i}(values):\n",
            "max_tokens": self.max_tokens,
            "temperature": i % 2,
            "seed": 100 + i,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **self.fields,
            **self.kinds[i % len(self.kinds)],
        }

    def run(self, i: int) -> Stream:
        """Run stream ``i`` to its end."""
        stream, heard_s, self.num_chunks[i] = Stream(), time.monotonic(), 0
        try:
            with httpx2.stream(
                "POST",
                f"{self.url}/v1/completions",
                json=self.body(i),
                headers=dict(self.headers),
                timeout=STREAM_TIMEOUT_S,
                trust_env=False,
            ) as answer:
                if answer.status_code != 200:
                    answer.read()
                    stream.error = f"HTTP {answer.status_code}: {answer.text[:200]}"
                    return stream
                for event in _events(answer.iter_lines()):
                    now_s = time.monotonic()
                    stream.longest_pause_s, heard_s = max(stream.longest_pause_s, now_s - heard_s), now_s
                    if "error" in event:
                        stream.error = str(event["error"])
                        return stream
                    self.num_chunks[i] += 1
                    for choice in event["choices"]:
                        stream.text += choice["text"]
                        stream.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    if event.get("usage"):
                        stream.num_tokens = event["usage"]["completion_tokens"]
        except httpx2.HTTPError as error:
            stream.error = repr(error)
        if stream.num_tokens is None and stream.error is None:
            stream.error = "the stream ended without its usage"
        return stream

    @contextmanager
    def running(self) -> Iterator[Callable[[], list[Stream]]]:
        """Start all streams; gives how to wait for them."""
        self.num_chunks.clear()
        with ThreadPoolExecutor(self.count) as pool:
            self._futures = [pool.submit(self.run, i) for i in range(self.count)]
            yield lambda: [future.result() for future in self._futures]

    def are_running(self) -> bool:
        """Whether none has ended yet."""
        return not any(future.done() for future in self._futures)

    def have_begun(self) -> bool:
        """Whether every stream has had two chunks."""
        return len(self.num_chunks) == self.count and min(self.num_chunks.values()) >= 2


def _events(lines: Iterator[str]) -> Iterator[dict]:
    for line in lines:
        field, _, data = line.partition(": ")  # of a comment it is empty
        if field == "data" and data != "[DONE]":
            yield json.loads(data)


@dataclass(frozen=True)
class Comparison:
    """Streams against their undisturbed runs.

    Attributes:
        broken: Indices of streams that did not reach their end.
        lost: Of those that did, with fewer tokens.
        doubled: With more tokens.
        changed: With as many tokens and another text.
        num_tokens: Tokens compared.
        longest_pause_s: Over all streams that ended.
    """

    broken: tuple[int, ...]
    lost: tuple[int, ...]
    doubled: tuple[int, ...]
    changed: tuple[int, ...]
    num_tokens: int
    longest_pause_s: float

    @property
    def is_exact(self) -> bool:
        """Whether no stream that ended differs."""
        return not (self.lost or self.doubled or self.changed)

    @classmethod
    def of(cls, streams: Sequence[Stream], undisturbed: Sequence[Stream]) -> Comparison:
        """Compare stream by stream; what a broken stream delivered must be the beginning of its text."""
        pairs = list(enumerate(zip(streams, undisturbed, strict=True)))
        ended = [(i, s, u) for i, (s, u) in pairs if s.error is None]
        assert all(u.num_tokens is not None for u in undisturbed), [u.error for u in undisturbed]
        return cls(
            broken=tuple(i for i, (s, _) in pairs if s.error is not None),
            lost=tuple(i for i, s, u in ended if s.num_tokens < u.num_tokens),
            doubled=tuple(i for i, s, u in ended if s.num_tokens > u.num_tokens),
            changed=tuple(i for i, s, u in ended if s.num_tokens == u.num_tokens and s.text != u.text)
            + tuple(i for i, (s, u) in pairs if s.error is not None and not u.text.startswith(s.text)),
            num_tokens=sum(s.num_tokens for _, s, _ in ended),
            longest_pause_s=max((s.longest_pause_s for _, s, _ in ended), default=0.0),
        )


def kill_one(
    service: RunningService, victim: str, rng: random.Random | None = None, spared: Sequence[int] = ()
) -> psutil.Process | None:
    """End one process of a kind as a crash would; None where none runs but those with the spared ids."""
    processes = [process for process in processes_of(service, victim) if process.pid not in spared]
    if not processes:
        return None
    process = rng.choice(processes) if rng else processes[0]
    process.send_signal(signal.SIGKILL)
    return process


@dataclass(frozen=True)
class Aftermath:
    """What a kill led to.

    Attributes:
        streams: Those that ran.
        unreachable_s: From the kill until a new request was answered.
    """

    streams: list[Stream]
    unreachable_s: float


def under_kill(service: RunningService, streams: Streams, *victims: str) -> Aftermath:
    """Run all streams, kill a process of each kind named once all have begun, and wait until they are replaced.

    A kind that is named twice loses two processes, at once like all others.
    """
    num_before = {victim: len(processes_of(service, victim)) for victim in victims}
    with streams.running() as wait:
        eventually(streams.have_begun, 120, "all streams have begun")
        killed: list[int] = []
        for victim in victims:
            process = kill_one(service, victim, spared=killed)
            assert process is not None, f"no {victim} runs"
            killed.append(process.pid)
        unreachable_s = eventually(lambda: answers(service), 120, "a new request is answered")
        ended = wait()
    for victim, number in num_before.items():
        replaced = lambda v=victim: [p for p in processes_of(service, v) if p.pid not in killed]  # noqa: E731
        eventually(lambda n=number, r=replaced: len(r()) >= n, 120, f"the {victim} is replaced")
    eventually(service.is_ready, 120, "the service is ready again")
    return Aftermath(ended, unreachable_s)


def compared_under_kill(service: RunningService, victim: str) -> Comparison:
    """Eight streams while a process dies, against the same streams undisturbed."""
    streams = Streams(service.url, service.model, count=8, max_tokens=300)
    with streams.running() as finish:
        undisturbed = finish()
    return Comparison.of(under_kill(service, streams, victim).streams, undisturbed)


def answers(service: RunningService) -> bool:
    """Whether a new connection is taken, and a request on it answered."""
    try:
        return httpx2.get(f"{service.url}/v1/models", timeout=5, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def under_random_kills(
    service: RunningService,
    streams: Streams,
    *,
    count: int,
    period_s: float,
    seed: int,
    victims: Sequence[str] = ("draft", "target", "router"),
    num_tokens: int = 0,
) -> tuple[list[list[Stream]], list[str]]:
    """Run all streams, again and again, while processes are killed at random; the last kill is under streams, too.

    Args:
        service: That runs.
        streams: To run.
        count: Kills.
        period_s: Seconds between two.
        seed: Of the order of the kills.
        victims: Who is killed.
        num_tokens: Go on until so many have come, at least.

    Returns:
        What became of the streams, round by round, and who was killed.
    """
    killed: list[str] = []
    rng = random.Random(seed)

    def kill() -> None:
        while len(killed) < count:
            time.sleep(period_s)
            victim = rng.choice(victims)
            if kill_one(service, victim, rng) is not None:
                killed.append(victim)

    rounds: list[list[Stream]] = []
    killer = threading.Thread(target=kill)
    killer.start()
    while killer.is_alive() or sum(stream.num_tokens or 0 for ended in rounds for stream in ended) < num_tokens:
        with streams.running() as wait:
            rounds.append(wait())
    killer.join()
    eventually(service.is_ready, 120, "the service is ready again")
    return rounds, killed


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the kill table: rows for each demo pair, number of replicas and temperature; three runs each, medians.

    Each choice makes a part of it: ``--demo plain --replicas 1 --victims target``, or ``--demo '' --cluster node``.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--demo", default="plain,hybrid", help="pairs, separated by commas")
    parser.add_argument("--replicas", default="1,2", help="replicas of each deployment, separated by commas")
    parser.add_argument("--victims", default=",".join(VICTIMS), help="target+router: both at once")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--random-kills", type=int, default=10, help="kills, 5 s apart, with two replicas; 0: none")
    parser.add_argument("--cluster", default="", help="gcs, head, node, separated by commas; needs redis-server")
    options = parser.parse_args(arguments)
    titles = ["pair", "of each", "killed", "T", "streams", "broken", "tokens compared", "lost", "doubled", "changed"]
    print("| " + " | ".join([*titles, "longest pause, s", "unreachable, s"]) + " |")
    print("|---" * (len(titles) + 2) + "|")
    for demo in filter(None, options.demo.split(",")):
        for replicas in map(int, options.replicas.split(",")):
            _print_rows(demo, replicas, options)
    for event in filter(None, options.cluster.split(",")):
        _print_cluster_row(event, options)


def _print_rows(demo: str, replicas: int, options: argparse.Namespace) -> None:
    service = start(replicas, "--demo", demo)
    try:
        streams = Streams(service.url, service.model, options.streams, options.max_tokens)
        with streams.running() as wait:
            undisturbed = wait()
        _print_row([demo, replicas, "nobody"], [Aftermath(undisturbed, 0.0)], undisturbed)
        for victim in filter(None, options.victims.split(",")):
            runs = [under_kill(service, streams, *victim.split("+")) for _ in range(options.runs)]
            _print_row([demo, replicas, victim], runs, undisturbed)
        if options.random_kills and replicas > 1:
            rounds, killed = under_random_kills(service, streams, count=options.random_kills, period_s=5.0, seed=1)
            runs = [Aftermath(ended, 0.0) for ended in rounds]
            _print_row([demo, replicas, f"{len(killed)} at random"], runs, undisturbed)
    finally:
        service.stop()


def _print_cluster_row(event: str, options: argparse.Namespace) -> None:
    """A line of deaths on a cluster of several nodes; each is a process of its own, as Ray reads its environment."""
    command = [sys.executable, "-m", "tests.integration.cluster_deaths", event, "--streams", str(options.streams)]
    runs = []
    for _ in range(options.runs):
        done = subprocess.run([*command, "--max-tokens", str(options.max_tokens)], stdout=subprocess.PIPE, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cells = ["plain", 2, event, "0 and 1", options.streams * len(runs), sum(len(run["broken"]) for run in runs)]
    cells += [sum(run["num_tokens"] for run in runs)]
    cells += [sum(len(run[what]) for run in runs) for what in ("lost", "doubled", "changed")]
    cells += [f"{statistics.median(run['longest_pause_s'] for run in runs):.2f}", "-"]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def start(replicas: int, *flags: str) -> RunningService:
    """A service with so many replicas of each deployment, whose drafts do not depend on the controller."""
    counts = [f"--replicas-{name}={replicas}" for name in ("target", "draft", "router", "ingress")]
    return RunningService("--num-speculative-tokens", "4", *counts, *flags)


def _print_row(names: Sequence[object], runs: Sequence[Aftermath], undisturbed: Sequence[Stream]) -> None:
    """A line for each temperature: sums over the runs, and medians of their seconds."""
    unreachable_s = statistics.median(run.unreachable_s for run in runs)
    for temperature in (0, 1):
        compared = [Comparison.of(run.streams[temperature::2], undisturbed[temperature::2]) for run in runs]
        cells = [*names, temperature, sum(len(run.streams[temperature::2]) for run in runs)]
        cells += [sum(len(one.broken) for one in compared), sum(one.num_tokens for one in compared)]
        cells += [sum(len(of(one)) for one in compared) for of in (_lost, _doubled, _changed)]
        cells += [f"{statistics.median(one.longest_pause_s for one in compared):.2f}", f"{unreachable_s:.2f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


_lost, _doubled, _changed = map(attrgetter, ("lost", "doubled", "changed"))


if __name__ == "__main__":
    main()
