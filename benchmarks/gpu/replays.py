"""Times of what is recorded, by launching it again: on a GPU the device's own, without the host's work beside it.

A launch moves rows on by the tokens that it reads. That costs nothing more, but a sequence's length must have room for
it, and what the device has of the rows is not known afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from specdec.cache.blocks import CachedSequence
from specdec.core.backends import DraftJob, Status
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.drafter import ModelDrafter
from specdec.executor.graphs import Graphs
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner

REPEATS = 15
ROOM = 256
"""Positions beyond the context for what launches read: at most 9 tokens each, and as many rows of a chain."""
_CHUNK = 1024
_CHAINS = (4, 8)
"""Lengths whose difference says what a token in a chain costs."""
_MOST_READS = 10_000


def launches_s(graphs: Graphs[Any, Any], key: Any, device: torch.device, repeats: int) -> float:
    """Median seconds of what a key names."""
    spent = []
    with torch.inference_mode():
        for _ in range(repeats):
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graphs.launch(key)
                end.record()
                end.synchronize()
                spent.append(start.elapsed_time(end) / 1e3)
            else:
                start_s = time.monotonic()
                graphs.launch(key)
                spent.append(time.monotonic() - start_s)
    return statistics.median(spent)


def read_contexts(runner: ModelRunner, sequences: Sequence[CachedSequence], context: int) -> None:
    """Have sequences hold so many tokens."""
    for sequence in sequences:
        while len(sequence) < context:
            count = min(_CHUNK, context - len(sequence))
            assert runner.reserve(sequence, len(sequence) + count), "the cache is too small"
            runner.forward([RowInput(sequence, [1] * count, 1)])


def forward(runner: ModelRunner, sequences: Sequence[CachedSequence], count: int) -> torch.Tensor:
    """A step of ``count`` tokens a row, each of which wants logits."""
    for sequence in sequences:
        assert runner.reserve(sequence, len(sequence) + count), "the cache is too small"
    return runner.forward([RowInput(sequence, [1] * count, count) for sequence in sequences])


def step_s(runner: ModelRunner, sequences: Sequence[CachedSequence], count: int, repeats: int = REPEATS) -> float:
    """Seconds of a recorded step of ``count`` tokens a row, whose sequences are as before in the end."""
    graphs, num_tokens = runner._graphs, count * len(sequences)
    forward(runner, sequences, count)
    size = None if graphs is None else graphs.size_for(num_tokens, num_tokens)
    assert graphs is not None, "steps are not recorded"
    assert size is not None, f"no step of {num_tokens} tokens is recorded"
    took_s = launches_s(graphs, size, runner.loaded.device, repeats)
    runner._steps.forget()
    for sequence in sequences:
        runner.truncate(sequence, len(sequence) - count)
    return took_s


def chain_token_s(drafter: ModelDrafter, num_rows: int, context: int, repeats: int = REPEATS) -> float:
    """Seconds of a token inside a chain: a quarter of what a chain of 8 takes more than one of 4.

    Where chains are not recorded, whole draft steps are timed.

    Args:
        drafter: Drafts for rows that are equal.
        num_rows: Of the step.
        context: Tokens that each row has behind it.
        repeats: Timed launches of each length.
    """
    log = TokenLog([3 + i % 11 for i in range(context)])
    spec = SequenceSpec(SamplingParams(temperature=0, ignore_eos=True), 0, context, drafter.max_model_len)
    keys = [f"chain-{num_rows}-{row}" for row in range(num_rows)]
    runner, chains = drafter._runner, drafter._runner._chains

    def jobs(agreed: int, num_tokens: int) -> list[DraftJob]:
        return [DraftJob(key, log.tokens, spec, agreed, context, num_tokens=num_tokens) for key in keys]

    for _ in range(_MOST_READS):
        if all(proposal.status is Status.DECIDED for proposal in drafter.propose(jobs(0, 1))):
            break
    took_s = []
    for length in _CHAINS:
        start_s = time.monotonic()
        drafter.propose(jobs(context, length))
        took_s.append(time.monotonic() - start_s)
        recorded = [] if chains is None else chains.keys_for(num_rows, [length] * num_rows)
        if chains is not None and recorded:
            took_s[-1] = launches_s(chains, recorded[0], runner.loaded.device, repeats)
            runner._steps.forget()
    for key in keys:
        drafter.release(key)
    return max(0.0, took_s[1] - took_s[0]) / (_CHAINS[1] - _CHAINS[0])
