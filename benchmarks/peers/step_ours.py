"""Our runner's step of one row: a token in, the likeliest token out.

The fourth argument is the quantization; ``int8*8`` reads 8 tokens a step, as drafts in one pass do.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.peers.step_loop import Given, take_steps
from specdec.core.types import Quantization
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_model


def main(quantization: Quantization, num_tokens: int) -> None:
    """Load, read a prompt, and take steps after it."""
    given = Given.read()
    torch.set_num_threads(given.threads)
    dtype = "float32" if quantization == "none" else "bfloat16"  # in which few bits are fast
    loaded = load_model(ModelSource(given.model, dtype=dtype, device="cpu", quantization=quantization))
    runner = ModelRunner(loaded, num_blocks=2 + given.context // 16)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, given.context + num_tokens)
    runner.forward([RowInput(sequence, [*range(1, given.context + 1)], 0)])

    def step(count: int) -> None:
        token = 7
        for _ in range(count):
            assert runner.reserve(sequence, given.context + num_tokens)
            token = int(runner.forward([RowInput(sequence, [token] * num_tokens, num_tokens)]).argmax(-1)[0])
            runner.truncate(sequence, given.context)

    take_steps(f"weights {quantization}, {dtype}, {num_tokens} tokens a step", step)


if __name__ == "__main__":
    weights, _, tokens = sys.argv[4].partition("*")
    main(weights, int(tokens or 1))  # type: ignore[arg-type]
