"""Two checkouts of this repository on the same work: does a change cost tokens per second, or processor time?

    python -m benchmarks.versions BEFORE AFTER --streams 1,8 --rounds 7 --json FILE [KEY ...]

``BEFORE`` and ``AFTER`` are commands that run ``specdec``, each of its own checkout. Both serve at once; every round
asks both, in an order that changes. A file that is there is gone on with, so that rounds can be run in parts. All other
flags are those of ``specdec serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil

from benchmarks.modes.load import Workload, run_workload, served_model
from benchmarks.modes.prompts import prompts_of
from benchmarks.modes.services import START_TIMEOUT_S, STOP_TIMEOUT_S, is_healthy
from cluster.launch.local import check_port

Samples = dict[str, list[tuple[float, float, float, float]]]
"""Per number of streams a round each: tokens per second before and after, processor ms per token before and after."""


@contextmanager
def served(
    command: Sequence[str], flags: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, psutil.Process]]:
    """A service's address and process, until the context ends."""
    port = check_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*command, "--port", str(port), *flags], stdout=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        end_s = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(url):
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{' '.join(command)} does not serve")
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def processor_s(process: psutil.Process) -> float:
    """Processor time of a process and of all that it started."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def ask(url: str, process: psutil.Process, work: Workload) -> tuple[float, float]:
    """Tokens per second and processor ms per token of one run."""
    model = asyncio.run(served_model(url))
    before_s = processor_s(process)
    run = asyncio.run(run_workload(url, model, work))
    num_tokens = sum(arrival.num_tokens for stream in run.streams for arrival in stream.arrivals)
    return num_tokens / run.duration_s, 1e3 * (processor_s(process) - before_s) / num_tokens


def table(samples: Samples) -> str:
    """Markdown: medians, and the median ratio within rounds with its 95% interval by bootstrap."""
    rng = random.Random(0)
    lines = ["| streams | rounds | tokens/s before | after | after over before | processor ms a token before | after |"]
    lines.append("|---|---|---|---|---|---|---|")
    for streams, rounds in samples.items():
        ratios = [after / before for before, after, _, _ in rounds]
        medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
        before, after, before_ms, after_ms = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = f"{statistics.median(ratios):.2f} ({medians[100]:.2f} to {medians[3899]:.2f})"
        lines.append(
            f"| {streams} | {len(rounds)} | {before:.1f} | {after:.1f} | {ratio} | {before_ms:.2f} | {after_ms:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("before", type=os.path.abspath)
    parser.add_argument("after", type=os.path.abspath)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup-rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--json", type=Path)
    arguments, flags = parser.parse_known_args()
    samples: Samples = {}
    if arguments.json is not None and arguments.json.exists():
        samples = json.loads(arguments.json.read_text())
    with ExitStack() as stack:
        services = [
            stack.enter_context(served((command, "serve"), flags)) for command in (arguments.before, arguments.after)
        ]
        for streams in arguments.streams.split(","):
            for number in range(-arguments.warmup_rounds, arguments.rounds):
                kept = samples.setdefault(streams, [])
                work = Workload(prompts_of("code", int(streams)), arguments.max_tokens, 0.0, None, 1000 * len(kept))
                asked = [(i, ask(*services[i], work)) for i in ((0, 1) if number % 2 else (1, 0))]
                (before, before_ms), (after, after_ms) = (figures for _, figures in sorted(asked))
                print(f"{streams} streams: {before:.1f}, {after:.1f} tokens/s", flush=True)
                if number >= 0:
                    kept.append((before, after, before_ms, after_ms))
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(samples))
    print(table(samples))


if __name__ == "__main__":
    main()
