"""The same tokens whatever is drafted: the engine of one process with 0, 4 and 8 draft tokens a round.

Weights are random, so that the best tokens are often close to each other. In fp32 all tokens must be the same, but for
ties within rounding, which are counted; in bf16 rounding decides more often, which is counted too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.generation import Pair, Work
from benchmarks.gpu.pairs import near_pair
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import SHAPES
from specdec.engine.results import SpecStats
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.sampling.noise import gumbel

TIE = 1e-4
"""Scores closer than this may swap by rounding alone."""
DRAFT_LENGTHS = (0, 4, 8)
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Sizes:
    """What is run: a pair of shapes, of which the draft's is taken for both, how far they differ, and the work."""

    shapes: str
    noise: float
    work: Work


FULL = Sizes("8b-1b", 0.06, Work(num_rows=20, prompt_length=64, num_tokens=100))
SMALL = Sizes("tiny", 0.3, Work(num_rows=3, prompt_length=6, num_tokens=12))


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Generate in both types, by operators launched one by one without drafts, then by recorded steps."""
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        _check(report, device, name, dtype, sizes)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _check(report: Report, device: torch.device, name: str, dtype: torch.dtype, sizes: Sizes) -> None:
    pair = Pair(*near_pair(SHAPES[sizes.shapes]["draft"], device, dtype, sizes.noise), sizes.work)
    prompts = sizes.work.prompts(pair.runners["target"].vocab_size)
    launched = {heat: pair.generate(prompts, heat, 0)[0] for heat in TEMPERATURES}
    pair.record(report)
    total = SpecStats()
    for heat in TEMPERATURES:
        for length in DRAFT_LENGTHS:
            got, stats = pair.generate(prompts, heat, length)
            which = f"{name}, T = {heat:g}, K = {length}"
            found = [
                difference(pair.runners["target"], prompt, seed, heat, *texts)
                for seed, (prompt, *texts) in enumerate(zip(prompts, launched[heat], got, strict=True))
            ]
            gaps = [gap for gap in found if gap is not None]
            detail = f"{len(gaps)} of {len(got)} texts part at a tie, gaps {[f'{gap:.1e}' for gap in gaps]}"
            if name == "fp32":
                is_right = all(gap < TIE for gap in gaps)
                report.check(f"{which}: the tokens of launched steps without drafts", is_right, detail if gaps else "")
            else:
                # A text is compared up to its first other token: what follows is of another text.
                report.figure(f"exact_{name}_t{heat:g}_k{length}_flips", len(gaps))
            if length:
                accepted = stats.num_accepted_tokens / max(1, stats.num_drafts)
                report.figure(f"exact_{name}_t{heat:g}_k{length}_accepted", accepted)
                total += stats
    is_telling = 0 < total.num_accepted_tokens < total.num_draft_tokens
    report.check(f"{name}: drafts are both right and wrong", is_telling)


def difference(
    runner: ModelRunner, prompt: list[int], seed: int, temperature: float, want: list[int], got: list[int]
) -> float | None:
    """How far apart the scores of the first two tokens are that differ; None where none do."""
    for i, (one, other) in enumerate(zip(want, got, strict=True)):
        if one == other:
            continue
        sequence, tokens = runner.new_sequence(), [*prompt, *want[:i]]
        runner.reserve(sequence, len(tokens))
        scores = runner.forward([RowInput(sequence, tokens, 1)])[0]
        if temperature:
            scores = scores / temperature + gumbel([seed], [len(tokens)], len(scores), scores.device)[0]
        gap = float((scores[one] - scores[other]).abs())
        runner.free(sequence)
        return gap
    return None
