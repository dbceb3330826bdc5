"""A target of 32B's shape whose drafts come from the host's cores, beside plain decoding and a draft on the GPU.

The draft is right at a set rate (:func:`benchmarks.gpu.pairs.chain_pair`). With it on the host router, ingress, target
and drafter are the service's own, in this process, each worker on a thread of its own. On the GPU it drafts in turn.
On the host its weights are in int8 and int4 (by torchao), as they are, and in int8 by OpenVINO; the one with the
shortest step drafts.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.generation import Pair, Work
from benchmarks.gpu.pairs import chain_pair, save_pair
from benchmarks.gpu.report import Report
from benchmarks.several_drafters import Rates, Workers
from benchmarks.step_times import measure_steps
from specdec.core.backends import DraftBackend, TargetBackend
from specdec.core.errors import SpecdecError
from specdec.core.types import Engine, Quantization, Tokens
from specdec.drafting.length.controller import Controller
from specdec.drafting.length.modes import Bounds, expected_tokens
from specdec.engine.drafter import ModelDrafter
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_model
from specdec.sampling.pipeline import Sampler

ACCEPTANCE_RATE = 0.7
DRAFT_LENGTHS = (0, 1, 2, 4, 7)
NUM_BRANCHES = 16
FREE_CORES = 2
"""Left to the threads of target and router."""
WAYS: dict[str, tuple[Engine, Quantization]] = {
    **{way: ("transformers", way) for way in ("int8", "int4", "none")},
    "openvino_int8": ("openvino", "int8"),
}


@dataclass(frozen=True)
class Sizes:
    """What is run: shapes by name, texts, and how many of them count, after one that does not."""

    shapes: str
    work: Work
    num_texts: int
    repeats: int


FULL = Sizes("32b-0.6b", Work(num_rows=2, prompt_length=1, num_tokens=256), 6, 15)
SMALL = Sizes("tiny", Work(num_rows=2, prompt_length=1, num_tokens=24), 2, 3)


class HostDrafted(Workers):
    """A target and a drafter of their own; a text is compared with what its seed gave before.

    Attributes:
        texts: By seed.
        num_other: Texts that were not the same again.
    """

    def __init__(self, target: TargetBackend, drafter: DraftBackend, vocab_size: int) -> None:
        super().__init__(Controller(Bounds(num_branches=NUM_BRANCHES)))
        self._backends = target, drafter
        self._vocab_size = vocab_size
        self.texts: dict[int, list[int]] = {}
        self.num_other = 0

    def make_target(self) -> TargetBackend:
        """The target's backend."""
        return self._backends[0]

    def make_drafter(self, name: str) -> DraftBackend:
        """The drafter's."""
        return self._backends[1]

    def prompt(self, seed: int) -> Tokens:
        """One token, another for each seed."""
        return (2 + 7919 * seed % (self._vocab_size - 2),)

    def check(self, seed: int, tokens: Sequence[int]) -> None:
        """Compare a text."""
        self.num_other += self.texts.setdefault(seed, [*tokens]) != [*tokens]


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Make the pair, find the fastest draft on the host, and decode each text in three ways."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - FREE_CORES))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models = dict(chain_pair(sizes.shapes, device, dtype, ACCEPTANCE_RATE, next_guess=True))
    pair = Pair(models["target"], models["draft"], sizes.work)
    pair.record(report)
    assert pair.drafter is not None
    target_s, draft_s = step_times(pair.target, pair.drafter, sizes)
    report.figure("host_drafter_target_step_ms", 1e3 * target_s[0])
    report.figure("host_drafter_draft_step_gpu_ms", 1e3 * draft_s)
    best = max(target_s, key=lambda k: expected_tokens(ACCEPTANCE_RATE, k) / (target_s[k] + k * draft_s))
    with tempfile.TemporaryDirectory() as folder:
        save_pair(Path(folder), iter([("draft", models["draft"])]))
        drafter = fastest(report, pair.target, Path(folder, "draft"), sizes)
    vocab_size = pair.runners["target"].vocab_size
    line = HostDrafted(pair.target, drafter, vocab_size)
    plain, host = asyncio.run(on_host(line, sizes))
    in_turn = []
    for seed in range(1 + sizes.num_texts):
        started_s = time.monotonic()
        (text,), _ = pair.generate([line.prompt(seed)], 1.0, best)
        in_turn.append(sizes.work.num_tokens / (time.monotonic() - started_s))
        line.check(seed, text)
    report.check("drafts on the host and on the GPU: the same texts as without", line.num_other == 0)
    rates = {"plain": plain, "host": host, "gpu_in_turn": in_turn[1:]}
    middle = {name: statistics.median(of_way) for name, of_way in rates.items()}
    for name, rate in middle.items():
        report.figure(f"host_drafter_{name}_tokens_per_s", rate)
    report.figure("host_drafter_over_plain", middle["host"] / middle["plain"])
    report.figure("host_drafter_over_gpu_in_turn", middle["host"] / middle["gpu_in_turn"])


def step_times(target: TargetBackend, drafter: DraftBackend, sizes: Sizes) -> tuple[dict[int, float], float]:
    """Seconds of a target's step by its draft tokens, and of a draft step, of one row."""
    context = sizes.work.prompt_length + sizes.work.num_tokens // 2
    found = measure_steps(
        target, drafter, batches=(1,), draft_lengths=DRAFT_LENGTHS, context=context, repeats=sizes.repeats
    )
    of_target = {step.num_draft_tokens: step.median_s for step in found if step.device == "target"}
    return of_target, next(step.median_s for step in found if step.device == "draft")


def fastest(report: Report, target: TargetBackend, folder: Path, sizes: Sizes) -> ModelDrafter:
    """The draft in each of ``WAYS`` on the host; gives the one with the shortest step."""
    found: list[tuple[float, ModelDrafter]] = []
    length = sizes.work.max_length
    num_blocks = (sizes.work.num_rows + NUM_BRANCHES) * (length // 16 + 2)
    for way, (engine, quantization) in WAYS.items():
        dtype = "float32" if quantization == "none" else "bfloat16"
        source = ModelSource(str(folder), dtype=dtype, device="cpu", quantization=quantization, engine=engine)
        try:
            loaded = load_model(source)
            if engine == "transformers":
                runner = ModelRunner(loaded, num_blocks=num_blocks)
            else:
                from specdec.executor.openvino.runner import OpenVINORunner

                runner = OpenVINORunner(loaded, num_blocks=num_blocks, quantization=quantization)
        except (SpecdecError, ImportError) as error:
            report.say(f"on the host, {way}: {error}")
            continue
        sampler = Sampler(runner.vocab_size)
        drafter = ModelDrafter(runner, sampler, max_model_len=length, max_num_batched_tokens=2048)
        target_s, draft_s = step_times(target, drafter, sizes)
        report.figure(f"host_drafter_draft_step_{way}_ms", 1e3 * draft_s)
        report.figure(f"host_drafter_c_{way}", draft_s / target_s[0])
        found.append((draft_s, drafter))
    return min(found, key=lambda one: one[0])[1]


async def on_host(line: HostDrafted, sizes: Sizes) -> tuple[list[float], list[float]]:
    """Tokens per second of each text, plainly and with the host's drafts, by turns."""
    await line.start()
    found: list[tuple[Rates, Rates]] = []
    for seed in range(1 + sizes.num_texts):
        ways = (0, None) if seed % 2 else (None, 0)
        rates = {most: await line.decode([seed], sizes.work.num_tokens, most) for most in ways}
        found.append((rates[0], rates[None]))
    line.stop()
    return [plain.last for plain, _ in found[1:]], [host.last for _, host in found[1:]]
