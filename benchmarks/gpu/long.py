"""Recorded steps of a target of real size over the least that the device can do, after long contexts too.

The least is the larger of two times: reading weights, keys and values at the measured bandwidth, and the products at
the measured rate. A step's logits are compared with those of transformers' own attention, and its waits are counted.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.device import product_rate, read_bandwidth
from benchmarks.gpu.executor import record
from benchmarks.gpu.replays import REPEATS, ROOM, forward, read_contexts, step_s
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import BLOCK_SIZE, SHAPES, make_model, read_bytes
from specdec.cache.blocks import CachedSequence
from specdec.core.errors import ModelLoadError
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel
from specdec.models.parity_check import NUM_CHECKED_ROWS, NUM_CHECKED_TOKENS, check_admission

MOST_DRAFT_TOKENS = 7
_NEEDED_S = 12.0
_SPARE = 0.85
"""Of the memory that is free, what keys and values may take: graphs come after them."""


@dataclass(frozen=True)
class Sizes:
    """What is run: a model, positions before a step, rows of it, tokens a row, and how often."""

    shapes: str
    role: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    counts: tuple[int, ...]
    repeats: int


FULL = Sizes("8b-1b", "target", (1024, 8192), (1, 16, 64), (1, 5, 8), REPEATS)
SMALL = Sizes("tiny", "target", (8, 32), (1, 3), (1, 3), 2)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Record the model, compare its logits, then time its steps, those with more rows and longer contexts last."""
    loaded = make_model(
        SHAPES[sizes.shapes][sizes.role], device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    max_length = max(sizes.contexts) + ROOM
    batches = [rows for rows in sizes.batches if _fits(loaded, rows, max_length)]
    if len(batches) < len(sizes.batches):
        report.say(f"left out for want of memory: {max(sizes.batches)} rows after {max(sizes.contexts)} tokens")
    num_blocks = (max(batches) + 1) * (-(-max_length // BLOCK_SIZE) + 1)
    runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    start_s = time.monotonic()
    num_rows, most = max(*batches, NUM_CHECKED_ROWS), max(max_length, NUM_CHECKED_TOKENS)
    record(report, f"the {sizes.role}", runner, ExecutorLimits(num_rows, 2048, most, MOST_DRAFT_TOKENS))
    report.figure(f"{sizes.role}_record_s", time.monotonic() - start_s)
    report.figure(f"{sizes.role}_graphs_mib", runner.graphs_bytes / 2**20)
    try:
        detail = f"relative error {check_admission(runner).relative_error:.2g}"
    except ModelLoadError as refused:
        report.check("logits as with transformers' own attention", False, str(refused))
    else:
        report.check("logits as with transformers' own attention", True, detail)
    sequences = [runner.new_sequence() for _ in range(max(batches))]
    for context in sorted(sizes.contexts):
        for rows in batches:
            if not report.has_time(_NEEDED_S, f"{rows} rows after {context} tokens"):
                return
            read_contexts(runner, sequences[:rows], context)
            for count in sizes.counts:
                time_step(report, sizes, runner, sequences[:rows], count)
    count_waits(report, runner, sequences[: batches[-1]])


def time_step(
    report: Report, sizes: Sizes, runner: ModelRunner, sequences: Sequence[CachedSequence], count: int
) -> None:
    """A step's time on the device, and on the host as far as its tokens."""
    context, name = len(sequences[0]), f"{sizes.role}_{len(sequences)}x{count}_at_{len(sequences[0])}"
    host_s = []
    for _ in range(sizes.repeats):
        start_s = time.monotonic()
        forward(runner, sequences, count).argmax(1).cpu()
        host_s.append(time.monotonic() - start_s)
        for sequence in sequences:
            runner.truncate(sequence, context)
    least_s = least_step_s(runner.loaded, len(sequences), count, context)
    took_s = step_s(runner, sequences, count, sizes.repeats)
    report.figure(f"{name}_ms", 1e3 * took_s, over=1e3 * least_s, most=1.4)
    report.figures[f"{name}_host_ms"] = 1e3 * statistics.median(host_s)


def least_step_s(loaded: LoadedModel, num_rows: int, count: int, context: int) -> float:
    """The larger of two times: of reading weights, keys and values once, and of multiplying by each weight read."""
    read = read_bytes(loaded)
    cached = num_rows * (context + count) * sum(layer.bytes_per_token for layer in loaded.attention_layers)
    num_weights = read / loaded.dtype.itemsize
    rate = product_rate(loaded.device)
    return max((read + cached) / read_bandwidth(loaded.device), 2 * num_weights * num_rows * count / rate)


def count_waits(report: Report, runner: ModelRunner, sequences: Sequence[CachedSequence]) -> None:
    """Until its logits are there a step waits for nothing, by what torch warns of."""
    if runner.loaded.device.type != "cuda":
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            forward(runner, sequences, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in told if "synchroniz" in str(one.message)]
    report.check("a recorded step waits for nothing before its result", not waits, f"{len(waits)}, {waits[:1]}")


def _fits(loaded: LoadedModel, num_rows: int, length: int) -> bool:
    if loaded.device.type != "cuda":
        return True
    needed = num_rows * length * sum(layer.bytes_per_token for layer in loaded.attention_layers)
    return needed < _SPARE * torch.cuda.mem_get_info(loaded.device)[0]
