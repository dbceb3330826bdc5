"""What recorded steps, and a step of the largest size, take on the device, beside what is planned for them."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from benchmarks.gpu.executor import record
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import BLOCK_SIZE, SHAPES, make_model
from specdec.engine.warmup import StepLimits, measure_step
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner

_MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """What is run: models, and the largest step."""

    shapes: str
    max_rows: int
    max_tokens: int
    max_length: int


FULL = Sizes("8b-1b", 64, 2048, 2048)
SMALL = Sizes("tiny", 4, 64, 64)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Plan as a service does at its start, then record as it does, and compare."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for role, fields in SHAPES[sizes.shapes].items():
        loaded = make_model(fields, device, dtype)
        limits = ExecutorLimits(sizes.max_rows, sizes.max_tokens, sizes.max_length, max_draft_tokens=7)
        planned = measure_step(
            loaded,
            StepLimits(sizes.max_rows, sizes.max_tokens),
            max_model_len=sizes.max_length,
            vocab_size=loaded.vocab_size,
            graphs=limits,
        )
        step_bytes = planned.activation_bytes[loaded.device] - planned.graphs_bytes
        report.figure(f"memory_{role}_step_planned_mib", step_bytes / _MIB)
        runner = ModelRunner(loaded, num_blocks=sizes.max_length // BLOCK_SIZE, block_size=BLOCK_SIZE)
        record(report, f"the {role}", runner, limits)
        plan_mib = planned.graphs_bytes / _MIB
        # On a CPU nothing is recorded, and nothing planned for it.
        over = {"over": plan_mib, "most": 1.05} if plan_mib else {}
        report.figure(f"memory_{role}_graphs_mib", runner.graphs_bytes / _MIB, **over)
        runner.forget_graphs()
        del runner, loaded
        if device.type == "cuda":
            gc.collect()  # a runner and its graphs know each other: else they are freed while others are measured
            torch.cuda.empty_cache()
