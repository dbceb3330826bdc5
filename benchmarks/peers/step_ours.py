"""Our runners' step of one row: a token in, the likeliest token out.

The fourth argument is the quantization, or ``bfloat16``; ``int8*8`` reads 8 tokens a step, as drafts in one pass do.
The fifth is ``openvino``, or ours.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch

from benchmarks.peers.step_loop import Given, take_steps
from specdec.core.types import Quantization
from specdec.executor.openvino.runner import OpenVINORunner
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_model


def main(weights: str, num_tokens: int, engine: str) -> None:
    """Load, read a prompt, and take steps after it."""
    given = Given.read()
    torch.set_num_threads(given.threads)
    dtype = "float32" if weights == "none" else "bfloat16"  # in which few bits are fast
    quantization: Quantization = "none" if weights == "bfloat16" else weights  # type: ignore[assignment]
    is_openvino = engine == "openvino"
    source = ModelSource(given.model, dtype=dtype, device="cpu", quantization=quantization)
    loaded = load_model(replace(source, engine="openvino") if is_openvino else source)
    make = partial(OpenVINORunner, quantization=quantization) if is_openvino else ModelRunner
    runner = make(loaded, num_blocks=2 + given.context // 16)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, given.context + num_tokens)
    runner.forward([RowInput(sequence, [*range(1, given.context + 1)], 0)])

    def step(count: int) -> None:
        token = 7
        for _ in range(count):
            assert runner.reserve(sequence, given.context + num_tokens)
            token = int(runner.forward([RowInput(sequence, [token] * num_tokens, num_tokens)]).argmax(-1)[0])
            runner.truncate(sequence, given.context)

    take_steps(f"{engine}, weights {quantization}, {dtype}, {num_tokens} tokens a step", step)


if __name__ == "__main__":
    weights, _, tokens = sys.argv[4].partition("*")
    main(weights, int(tokens or 1), sys.argv[5])
