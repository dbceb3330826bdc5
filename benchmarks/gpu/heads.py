"""An EAGLE-3 head on a target of real shape, with random weights: its drafts, and whole rounds, over the least.

A draft must read the head once for each of its tokens, and what fuses the target's states once; a round reads the
target, too. Beside a draft model: the figures of the section ``executor``, a target's step of 1 + K tokens and K steps
of the draft.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks.gpu.device import read_bandwidth
from benchmarks.gpu.executor import record
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import BLOCK_SIZE, SHAPES, make_model, read_bytes
from specdec.core.backends import Status, VerifyJob
from specdec.core.drafts import Draft
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.eagle3.heads import Eagle3Heads
from specdec.drafting.eagle3.layouts import Eagle3Config
from specdec.drafting.heads import HeadDrafter, HeadRow, with_heads
from specdec.engine.target import ModelTarget
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel
from specdec.sampling.pipeline import Sampler


@dataclass(frozen=True)
class Sizes:
    """What is run: the target, rows, tokens behind each, draft tokens a round, the head's vocabulary, and how often."""

    shapes: str
    batches: tuple[int, ...]
    context: int
    num_draft_tokens: int
    draft_vocab_size: int
    repeats: int


FULL = Sizes("8b-1b", (1, 16, 64), 1024, 4, 32000, 21)
SMALL = Sizes("tiny", (1, 3), 20, 2, 100, 3)
_NUM_COMPARED = 12


class TimedDrafter(HeadDrafter):
    """Notes how long the newest drafts took: it begins behind the step's decision, and ends with the tokens here."""

    newest_s = 0.0

    def drafts(self, states: Sequence[Tensor], rows: Sequence[HeadRow]) -> list[Draft]:
        """As there."""
        start_s = time.monotonic()
        made = super().drafts(states, rows)
        self.newest_s = time.monotonic() - start_s
        return made


class Rounds:
    """A target with a head whose sequences decode round by round.

    Args:
        loaded: The target with its head.
        heads: The head.
        sizes: What is run.
        is_recorded: Whether steps and drafts are recorded.
        report: Gets what is checked.
    """

    def __init__(
        self, loaded: LoadedModel, heads: Eagle3Heads, sizes: Sizes, is_recorded: bool, report: Report
    ) -> None:
        count, most = sizes.num_draft_tokens, max(sizes.batches)
        self.max_length = sizes.context + (1 + count) * (sizes.repeats + _NUM_COMPARED + 4)
        num_blocks = (most + 1) * (-(-self.max_length // BLOCK_SIZE) + 1)
        runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        if is_recorded:
            limits = ExecutorLimits(most, 2048, self.max_length, count, num_extra_words=1 << 20)
            record(report, "the target", runner, replace(limits, num_chained_passes=count))
        sampler = Sampler(runner.vocab_size)
        self.drafter = TimedDrafter(heads, runner, sampler, count)
        lengths = {"max_model_len": self.max_length, "max_num_batched_tokens": 2048, "max_num_seqs": most}
        self.target = ModelTarget(runner, sampler, **lengths, heads=self.drafter)
        self.jobs: list[VerifyJob] = []

    def begin(self, num_rows: int, context: int) -> None:
        """Let other sequences decode from now on, and read their prompts."""
        for job in self.jobs:
            self.target.release(job.key)
        params = SamplingParams(temperature=1.0, ignore_eos=True)
        self.jobs = [
            VerifyJob(
                f"{num_rows}-{i}",
                TokenLog([2 + i] * context),
                (),
                SequenceSpec(params, i, context, 1 << 20),
                max_own_tokens=64,
            )
            for i in range(num_rows)
        ]
        while not all(job.draft for job in self.jobs):
            self.round()

    def round(self) -> list[tuple[int, ...]]:
        """Verify all drafts, and draft anew; gives the drafts."""
        results = self.target.verify(self.jobs)
        for i, (job, result) in enumerate(zip(self.jobs, results, strict=True)):
            if result.status is Status.DECIDED:
                job.log.extend(result.run)
                self.jobs[i] = job._replace(draft=result.next_draft.tokens)
        return [job.draft for job in self.jobs]


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Compare drafts of a small model in fp32, recorded and not; then time those of the shape that is served."""
    small = replace(SMALL, repeats=_NUM_COMPARED)
    loaded, heads = make_eagle3(small, device, torch.float32)
    both = [Rounds(loaded, heads, small, is_recorded, report) for is_recorded in (True, False)]
    for rounds in both:
        rounds.begin(3, small.context)
    num_other = sum(both[0].round() != both[1].round() for _ in range(_NUM_COMPARED))
    report.check("recorded drafts of a head are those of passes one by one, fp32", num_other == 0, f"{num_other}")
    del both
    loaded, heads = make_eagle3(sizes, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    rounds, count = Rounds(loaded, heads, sizes, True, report), sizes.num_draft_tokens
    bandwidth, once = read_bandwidth(device), heads.fc.weight.nbytes
    draft_s = (count * (heads.num_bytes - once) + once) / bandwidth
    round_s = draft_s + (read_bytes(loaded) - heads.num_bytes) / bandwidth
    for num_rows in sizes.batches:
        rounds.begin(num_rows, sizes.context)
        drafts_s, whole_s = list[float](), list[float]()
        for _ in range(sizes.repeats):
            start_s = time.monotonic()
            rounds.round()
            whole_s.append(time.monotonic() - start_s)
            drafts_s.append(rounds.drafter.newest_s)
        for name, taken, least_s in (("draft", drafts_s, draft_s), ("round", whole_s, round_s)):
            figure = f"eagle3_{name}_{num_rows}x{count}_ms"
            report.figure(figure, statistics.median(taken) * 1e3, over=least_s * 1e3)


def make_eagle3(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[LoadedModel, Eagle3Heads]:
    """A random target, and a random head of one of its layers with a vocabulary of its own."""
    fields = SHAPES[sizes.shapes]["target"]
    target = make_model(fields, device, dtype)
    layer = AutoConfig.for_model("llama", max_position_embeddings=8192, **fields | {"num_hidden_layers": 1})
    config = Eagle3Config(layer, sizes.draft_vocab_size, layer.hidden_size)
    count, vocab_size = target.config.num_hidden_layers, target.vocab_size
    known = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(3))[: sizes.draft_vocab_size]
    with torch.device(device):
        heads = Eagle3Heads(
            config,
            config.layers_read(count),
            count + 1,
            target.model.get_input_embeddings().weight,
            None,
            known.sort().values.to(device),
            vocab_size,
        )
    heads.eval().requires_grad_(False).to(device, dtype)
    return with_heads(target, heads), heads
