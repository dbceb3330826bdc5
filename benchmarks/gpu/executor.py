"""Steps recorded as CUDA graphs against steps launched one operator at a time.

Both run one model over the same tokens. Padding changes how a library multiplies matrices, so logits are close, and in
fp32 the likeliest tokens are the same.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.device import seconds
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import BLOCK_SIZE, SHAPES, make_model
from specdec.core.errors import ModelLoadError
from specdec.executor.graphs import ExecutorLimits, StepGraphs
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.hidden import AFTER_NORM, HiddenStates
from specdec.models.loading import LoadedModel
from specdec.models.parity_check import check_admission

TREE, PATH = (-1, -1, 0, 0, 1, 2, 5), (0, 2, 5)
"""Parents of the last tokens of a row of 8, and what is kept of them."""


@dataclass(frozen=True)
class Sizes:
    """What is run: a model's shape, and how many steps of it."""

    shapes: str
    rounds: int


FULL = SMALL = Sizes("tiny", 60)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Compare a small model in fp32 step by step."""
    check_steps(report, make_model(SHAPES[sizes.shapes]["target"], device, torch.float32), sizes.rounds)
    if device.type == "cuda":
        check_refusal(report, device)


def check_refusal(report: Report, device: torch.device) -> None:
    """A step that waits for the device is not recorded, and what comes after it is as if it had never been tried."""

    def waits(size: int) -> Any:
        return torch.ones(size, device=device).sum().item()

    reason = StepGraphs(waits, device).record((16,))
    report.check("a step that waits is not recorded", bool(reason), reason)
    data = torch.ones(1 << 20, device=device)
    spent_s = seconds(data.sum, device)  # frees memory and captures
    report.check("after one that was not recorded others are", spent_s > 0)


def check_steps(report: Report, loaded: LoadedModel, num_rounds: int) -> None:
    """Rows of all kinds by both ways: chunks of prompts, single tokens, drafts, trees, forks, what was cut back.

    There are more sequences than slots, so that they take slots from each other.
    """
    rng = random.Random(1)
    loaded = replace(loaded, hidden=HiddenStates(loaded.model, (1, AFTER_NORM)))
    runners = [ModelRunner(loaded, num_blocks=1200, block_size=BLOCK_SIZE) for _ in range(2)]
    limits = ExecutorLimits(max_rows=8, max_tokens=512, max_length=600, max_draft_tokens=7, has_trees=True)
    record(report, "a model", runners[0], limits)
    try:
        error = f"relative error {check_admission(runners[0]).relative_error:.2g}"
    except ModelLoadError as refused:
        report.check("as with transformers' own attention, fp32", False, str(refused))
    else:
        report.check("as with transformers' own attention, fp32", True, error)
    sequences = [[runner.new_sequence() for runner in runners] for _ in range(24)]
    largest, hidden, num_other = 0.0, 0.0, 0
    for _ in range(num_rounds):
        chosen = rng.sample(range(len(sequences)), rng.randint(1, 8))
        counts = [rng.choice((1, 1, 4, 8, 60)) for _ in chosen]
        tokens = [[rng.randrange(loaded.vocab_size) for _ in range(count)] for count in counts]
        parents = [TREE if count == 8 and rng.random() < 0.5 else () for count in counts]
        forked, kept = rng.randrange(len(sequences)), [rng.randint(0, count) for count in counts]
        outputs, states = [], []
        for number, runner in enumerate(runners):
            rows = []
            for one, of_row, tree in zip(chosen, tokens, parents, strict=True):
                sequence = sequences[one][number]
                if len(sequence) > 400:
                    runner.truncate(sequence, 0)
                runner.reserve(sequence, len(sequence) + len(of_row))
                rows.append(RowInput(sequence, of_row, min(len(of_row), 8), parents=tree))
            # The model is one: its layers are compiled for both.
            with runners[0].uncompiled() if number else nullcontext():
                outputs.append(runner.forward(rows).clone())
            states.append(torch.cat(runner.hidden, 1).float())
            trees = [(row.sequence, len(row.sequence) - len(TREE), PATH) for row in rows if row.parents]
            runner.keep_paths(trees)
            for one, row, count in zip(chosen, rows, kept, strict=True):
                if not row.parents:
                    runner.truncate(row.sequence, len(row.sequence) - len(row.tokens) + count)
                if one == forked:
                    other = sequences[(one + 1) % len(sequences)]
                    runner.free(other[number])
                    other[number] = runner.fork(row.sequence)
        largest = max(largest, float((outputs[0] - outputs[1]).abs().max()))
        hidden = max(hidden, float((states[0] - states[1]).abs().max()))
        num_other += int((outputs[0].argmax(1) != outputs[1].argmax(1)).sum())
    report.check("the same tokens as operator by operator, fp32", num_other == 0, f"{num_other} differ")
    report.check("the same logits up to rounding, fp32", largest < 1e-3, f"largest difference {largest:.2g}")
    report.check("the same hidden states up to rounding, fp32", hidden < 1e-3, f"largest difference {hidden:.2g}")


def record(report: Report, name: str, runner: ModelRunner, limits: ExecutorLimits) -> None:
    """Record a model's steps; on a GPU with compiled layers, unless it is of a kind whose layers are never compiled."""
    is_compiled = runner.loaded.device.type == "cuda"
    runner.record_graphs(limits, "inductor" if is_compiled else None)
    report.check(f"{name} is recorded", not runner.graphs_failure, runner.graphs_failure)
    if is_compiled and runner.loaded.adapters is None and runner.states is None:
        report.check(f"{name} has compiled layers", not runner.compile_failure, runner.compile_failure)
