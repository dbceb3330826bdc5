"""``exactness: strict`` with whole steps: which products the library splits, the same bits in every step, and the cost.

A random model of an 8B's shape in bf16. Its steps are timed as they are served fast, with compiled layers, then fast
without these, then strict: so it shows whether the products cost more, or the layers that are not compiled.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.flips import Case, FlipRuns, Texts, cases, num_blocks
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import BLOCK_SIZE, SHAPES, make_model
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.unsplit import use_unsplit_products
from specdec.models.loading import LoadedModel


@dataclass(frozen=True)
class Sizes:
    """What is run: a shape, rows of timed steps, tokens behind each, texts that are compared and how they are read."""

    shapes: str
    role: str
    batches: tuple[int, ...]
    context: int
    repeats: int
    texts: Texts
    cases: tuple[Case, ...]

    @property
    def limits(self) -> ExecutorLimits:
        """The largest step is that of all texts' prompts at once."""
        most = max(self.batches)
        tokens = max(most * self.texts.num_prompt, 512)
        return ExecutorLimits(max_rows=most, max_tokens=tokens, max_length=self.context + 256, max_draft_tokens=8)

    def make_runner(self, loaded: LoadedModel, tile_tokens: int | None) -> ModelRunner:
        """With room for what is timed, and for what is compared."""
        of_texts = num_blocks(self.texts, max(case.batch for case in self.cases))
        of_rows = max(self.batches) * (-(-(self.context + 8) // BLOCK_SIZE) + 1)
        blocks = max(of_texts, of_rows)
        kernel = "auto" if tile_tokens is None else "triton"
        return ModelRunner(loaded, num_blocks=blocks, block_size=BLOCK_SIZE, kernel=kernel, tile_tokens=tile_tokens)


FULL = Sizes("8b-1b", "target", (1, 16, 64), 1024, 21, Texts(56, 16), tuple(cases((1, 16, 64))))
SMALL = Sizes("tiny", "draft", (2,), 8, 1, Texts(5, 3), (Case(2, 1, 4, True),))


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Fast, then strict; a bit that differs under strict makes the run fail."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = make_model(SHAPES[sizes.shapes][sizes.role], device, dtype)
    times: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fast", "plain", "strict"):
            if name == "strict":
                check_products(report, loaded, sizes.limits.graph_sizes, Path(folder))
            runner = sizes.make_runner(loaded, 0 if name == "strict" else None)
            runner.record_graphs(sizes.limits, "inductor" if name == "fast" and device.type == "cuda" else None)
            report.check(f"{name} steps are recorded", not runner.graphs_failure, runner.graphs_failure)
            times[name] = _times(runner, sizes)
            for step, took_s in times[name].items():
                report.figure(
                    f"{name}_step_{step}_ms",
                    took_s * 1e3,
                    over=times["fast"][step] * 1e3,
                    most=1.05 if name == "strict" else None,
                )
            if name != "plain":
                _compare(report, name, runner, sizes)
            runner.forget_graphs()
            del runner
            if device.type == "cuda":
                gc.collect()  # a runner and its graphs know each other
                torch.cuda.empty_cache()


def check_products(report: Report, loaded: LoadedModel, sizes: tuple[int, ...], folder: Path) -> None:
    """Have the model split nothing; see at which sizes the library does, and that our kernel never does."""
    from specdec.kernels.triton.product import product

    found = use_unsplit_products(loaded, sizes, folder)
    for name, of_shape in found.items():
        split = [size for size in sizes if size not in of_shape]
        report.figure(f"strict_{name.replace(' ', '_')}_split_sizes", len(split))
        report.say(f"the library's product {name} is not ours at {split or 'no size'} of {list(sizes)} rows")
    linears = {module.weight.shape: module for module in loaded.model.modules() if isinstance(module, nn.Linear)}
    for shape, linear in linears.items():
        rows = torch.randn(max(sizes), shape[1], device=loaded.device).to(linear.weight.dtype)
        whole = product(rows, linear.weight)
        others = [size for size in (1, 3, *sizes) if not torch.equal(product(rows[:size], linear.weight), whole[:size])]
        report.check(f"our product {shape[0]}x{shape[1]} has the same bits at all sizes", not others, f"not {others}")


def _compare(report: Report, name: str, runner: ModelRunner, sizes: Sizes) -> None:
    """Bits and tokens of texts in steps of many kinds against those of each alone."""
    runs = FlipRuns(runner, sizes.texts, max(case.batch for case in sizes.cases))
    found = [runs.compare(case) for case in sizes.cases]
    bits, tokens = sum(flips.num_bits for flips in found), sum(flips.num_tokens for flips in found)
    report.figure(f"{name}_positions", sum(flips.num_positions for flips in found))
    report.figure(f"{name}_positions_with_other_bits", bits)
    report.figure(f"{name}_other_tokens", tokens)
    if name == "strict":
        report.check("strict logits have the same bits in every step", not bits, f"{bits} positions differ")


def _times(runner: ModelRunner, sizes: Sizes) -> dict[str, float]:
    """Median seconds of steps of so many rows x 1 and 8 tokens, the tokens taken to the host."""
    sequences = [runner.new_sequence() for _ in range(max(sizes.batches))]
    for sequence in sequences:
        runner.reserve(sequence, sizes.context + 8)
        for start in range(0, sizes.context, 512):
            runner.forward([RowInput(sequence, [1] * min(512, sizes.context - start), 1)])

    def took_s(num_rows: int, count: int) -> float:
        start_s = time.monotonic()
        rows = [RowInput(sequence, [1] * count, count) for sequence in sequences[:num_rows]]
        runner.forward(rows).argmax(1).cpu()
        spent_s = time.monotonic() - start_s
        for row in rows:
            runner.truncate(row.sequence, sizes.context)
        return spent_s

    found = {
        f"{num_rows}x{count}": statistics.median(took_s(num_rows, count) for _ in range(sizes.repeats))
        for num_rows in sizes.batches
        for count in (1, 8)
    }
    for sequence in sequences:
        runner.free(sequence)
    return found
