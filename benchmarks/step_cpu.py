"""CPU time of the thread that runs a target's steps, over a device that does nothing.

    python -m benchmarks.step_cpu [--rows 64] [--context 8192] [--repeats 200]

The model's pass and the sampling kernels do nothing, as if they ran elsewhere; what is left is what a GPU waits for:
scheduling, laying out, the copies, and results. Every step decides token 0.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.core.backends import Status, Verification, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.target import ModelTarget
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.kernels.segmented import AttentionLayer, AttentionShape, AttentionStep
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler

VOCAB_SIZE = 4096
NUM_WARM = 20
SCENES: dict[str, tuple[SamplingParams, int]] = {
    "T=0": (SamplingParams(temperature=0.0, ignore_eos=True), 0),
    "T=1": (SamplingParams(temperature=1.0, ignore_eos=True), 0),
    "T=1, top_p": (SamplingParams(temperature=1.0, top_p=0.9, ignore_eos=True), 0),
    "T=1, 4 drafts": (SamplingParams(temperature=1.0, ignore_eos=True), 4),
    "penalties": (SamplingParams(frequency_penalty=0.1, presence_penalty=0.1, ignore_eos=True), 0),
}


class NoAttention:
    """An attention kernel that reads nothing."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._value_dim = shape.value_dim

    def prepare(self, step: AttentionStep) -> None:
        """Nothing is to be done."""

    def attend(self, queries: Tensor, key_pool: Tensor, value_pool: Tensor, layer: AttentionLayer) -> Tensor:
        """Zeros."""
        return queries.new_zeros(*queries.shape[:2], self._value_dim)


class NoSampler:
    """Sampling kernels that decide token 0 for everybody."""

    def __init__(self, vocab_size: int, max_rows: int, max_sequences: int, max_tokens: int, device: Any) -> None:
        self.chosen = torch.zeros(max_rows, dtype=torch.int32)
        self.record = torch.zeros(max_sequences, 2 + 2 * max_tokens, dtype=torch.int32)

    def decide(self, logits: Tensor, step: Any, **options: Any) -> None:
        """Nothing is to be done."""


def null_target(num_rows: int, context: int) -> ModelTarget:
    """A target whose device does nothing once :func:`cut_device` was called."""
    module: Any = types.ModuleType("no_device")
    module.NoAttention, module.TritonSampler = NoAttention, NoSampler
    sys.modules["no_device"] = sys.modules["specdec.kernels.triton.sample"] = module
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.for_model(
        "llama", **sizes, num_key_value_heads=1, vocab_size=VOCAB_SIZE, max_position_embeddings=4 * context
    )
    loaded = prepare_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), "tiny")
    runner = ModelRunner(
        loaded, num_blocks=num_rows * (2 * context // 16) + 16, kernel="no_device:NoAttention", vocab_size=VOCAB_SIZE
    )
    runner.record_graphs(ExecutorLimits(num_rows, 8192, 2 * context, max_draft_tokens=7, num_extra_words=1 << 18))
    sampler = Sampler(VOCAB_SIZE, on_kernels=True)
    return ModelTarget(runner, sampler, max_model_len=2 * context, max_num_batched_tokens=8192, max_num_seqs=num_rows)


def cut_device(target: ModelTarget) -> None:
    """From now on recorded steps give what the newest one gave, and run nothing."""
    graphs: Any = target._runner._graphs
    known = {size: graphs.launch(size) for size in graphs._keys}
    graphs.launch = known.__getitem__


class Scene:
    """Sequences that decode."""

    def __init__(self, target: ModelTarget, name: str, num_rows: int, context: int) -> None:
        self._target = target
        sampling, self._num_drafts = SCENES[name]
        common = [(7 + 3 * i) % VOCAB_SIZE for i in range(context)]
        self._logs = [TokenLog([*common, *((17 * i + j) % VOCAB_SIZE for j in range(16))]) for i in range(num_rows)]
        self._specs = [SequenceSpec(sampling, i, context + 16, context, arrival_s=float(i)) for i in range(num_rows)]
        self._keys = [f"{name} {i}" for i in range(num_rows)]
        while any(result.status is not Status.DECIDED for result in self.step()[1]):
            pass

    def step(self) -> tuple[float, list[Verification]]:
        """CPU seconds of a step, and what it gave."""
        draft = (5,) * self._num_drafts
        jobs = [
            VerifyJob(*one) for one in zip(self._keys, self._logs, [draft] * len(self._keys), self._specs, strict=True)
        ]
        began_s = time.thread_time()
        results = self._target.verify(jobs)
        spent_s = time.thread_time() - began_s
        for log, result in zip(self._logs, results, strict=True):
            log.extend(result.run)
        return spent_s, results

    def release(self) -> None:
        """Free its sequences."""
        for key in self._keys:
            self._target.release(key)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_cpu", description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--scenes", default=";".join(SCENES), help="names, separated by semicolons")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = null_target(given.rows, given.context)
    cut_device(target)
    print("| scene | ms |\n|---|---|")
    for name in given.scenes.split(";"):
        scene = Scene(target, name, given.rows, given.context)
        gc.collect()
        times = [scene.step()[0] for _ in range(NUM_WARM + given.repeats)][NUM_WARM:]
        scene.release()
        print(f"| {name} | {1e3 * statistics.median(times):.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
