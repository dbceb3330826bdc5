"""What a step of a model takes."""

from __future__ import annotations

import statistics
import time

import torch

from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner

NUM_STEPS = 32


def median_step_s(runner: ModelRunner, seed: int = 0) -> float:
    """Return the median time of a step of one token, in seconds.

    Args:
        runner: Its cache has room for a sequence of 64 tokens, or of the model's longest if that is shorter.
        seed: Of the random tokens that are read.
    """
    length = min(2 * NUM_STEPS, runner.loaded.max_model_len)
    text = torch.randint(runner.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    sequence, times_s, half = runner.new_sequence(salt=None), list[float](), length // 2
    try:
        assert runner.reserve(sequence, half), "no room for a text"
        runner.forward([RowInput(sequence, text[:half], half)])
        for token in text[half:]:
            assert runner.reserve(sequence, len(sequence) + 1), "no room for a text"
            started_s = time.perf_counter()
            logits = runner.forward([RowInput(sequence, [token], 1)])
            logits[0, 0].item()  # when it is there
            times_s.append(time.perf_counter() - started_s)
    finally:
        runner.free(sequence)
    return statistics.median(times_s)
