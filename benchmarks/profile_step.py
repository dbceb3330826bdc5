"""What a step of a model spends its time on: torch's profile of the operators, over many steps of one stream.

    python -m benchmarks.profile_step --target FOLDER [--dtype bfloat16] [--num-tokens 9] [--num-past-tokens 256]
        [--compile]

The step is timed without the profiler first; with it, every operator call takes longer, so the shares of small
operators, and of Python between them, are upper bounds. Gathering keys, and attention without a kernel of its own,
count as small operators.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_model

KINDS = {
    "linear layers": (
        "mkldnn::_linear_pointwise",
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "mkl::_mkl_linear",
    ),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::scaled_dot_product_attention"),
}
"""Operators by what they are for; all others are small ones."""


def make_step(source: ModelSource, num_tokens: int, num_past_tokens: int) -> Callable[[], None]:
    """A step of one sequence over ``num_tokens``, all of them verified, which can be repeated."""
    runner = ModelRunner(load_model(source), num_blocks=256)
    sequence = runner.new_sequence()
    length = num_past_tokens + num_tokens
    if not runner.reserve(sequence, length):
        raise ValueError(f"num_past_tokens + num_tokens must fit into {256 * runner.pool.block_size} positions")
    runner.forward([RowInput(sequence, [3] * num_past_tokens, 0)])

    def step() -> None:
        runner.reserve(sequence, length)
        runner.forward([RowInput(sequence, [5] * num_tokens, num_tokens)])
        runner.truncate(sequence, num_past_tokens)

    return step


def seconds_of(step: Callable[[], None], repeats: int) -> float:
    """Median of a step."""
    durations = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        step()
        durations.append(time.perf_counter() - started_s)
    return statistics.median(durations)


def shares_of(step: Callable[[], None], repeats: int) -> dict[str, float]:
    """Share of the profiled time by kind; ``Python`` is what no operator accounts for."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        started_s = time.perf_counter()
        for _ in range(repeats):
            step()
        duration_s = time.perf_counter() - started_s
    times: Counter[str] = Counter()
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key in names), "small operators")
        times[kind] += event.self_cpu_time_total * 1e-6
    times["Python"] = max(0.0, duration_s - times.total())
    return {kind: times[kind] / duration_s for kind in (*KINDS, "small operators", "Python")}


def main(arguments: list[str] | None = None) -> int:
    """Print a step's time and the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of a model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--num-tokens", type=int, default=9, help="new tokens of the step")
    parser.add_argument("--num-past-tokens", type=int, default=256, help="tokens cached before")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    source = ModelSource(str(options.target), dtype=options.dtype, device="cpu")
    step = make_step(source, options.num_tokens, options.num_past_tokens)
    seconds_of(step, 5)
    sys.stdout.write(f"step of {options.num_tokens} tokens: {seconds_of(step, options.repeats) * 1e3:.1f} ms\n")
    for kind, share in shares_of(step, options.repeats).items():
        sys.stdout.write(f"{kind}: {share:.0%}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
