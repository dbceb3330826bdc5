"""What the sampling kernels decide, in torch: steps that need them run on a CPU, in no time."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.kernels.sample import FLAGS, NUM_ACCEPTED, NUM_FIXED, SampleStep, record_width, thresholds
from specdec.sampling.acceptance import walk_draft
from specdec.sampling.noise import gumbel


class TorchSampler:
    """Has the attributes of :class:`specdec.kernels.triton.sample.TritonSampler`; takes no edits."""

    num_bytes = 0

    def __init__(self, vocab_size: int, rows: int, sequences: int, tokens: int, device: torch.device) -> None:
        self._vocab_size, self._max_tokens = vocab_size, tokens
        self.edited = torch.zeros(rows, vocab_size, device=device)
        self.chosen = torch.zeros(rows, dtype=torch.int32, device=device)
        self.record = torch.zeros(sequences, record_width(tokens), dtype=torch.int32, device=device)
        self.num_bytes = self.edited.nbytes

    def decide(
        self,
        logits: Tensor,
        step: SampleStep,
        scores: Tensor | None = None,
        record: Tensor | None = None,
        **options: Any,
    ) -> None:
        """As there."""
        assert not options["penalties"]
        rows = np.flatnonzero(step.sequence.numpy() >= 0)
        sequence = step.sequence.numpy()[rows]
        heat = step.temperature.numpy()[sequence][:, None]
        given = logits[rows, : self._vocab_size].float().numpy()
        scaled = np.where(heat > 0, (given - given.max(1, keepdims=True)) / np.where(heat > 0, heat, 1), given)
        cuts = (one.numpy()[sequence] for one in (step.top_k, step.top_p, step.min_p))
        kept = np.where((heat > 0) & (scaled < thresholds(scaled, *cuts)[:, None]), -np.inf, scaled)
        seeds = [seed % (1 << 64) for seed in step.seed.numpy()[sequence].tolist()]
        noise = gumbel(seeds, step.position.numpy()[rows].tolist(), self._vocab_size, "cpu").numpy()
        kept = torch.from_numpy(np.where(heat > 0, kept + noise, kept).astype(np.float32))
        self.chosen[: len(step.sequence)] = -1
        self.chosen[rows] = kept.argmax(1).int()
        if scores is not None:
            scores[rows] = kept
        for number, (first, count) in enumerate(zip(step.first.tolist(), step.count.tolist(), strict=True)):
            if count:
                chosen = self.chosen[first : first + count].tolist()
                run = walk_draft(chosen, step.draft[first + 1 : first + count].tolist())
                line = (self.record if record is None else record)[number]
                line[NUM_ACCEPTED], line[FLAGS] = run.num_accepted, 0
                line[NUM_FIXED : NUM_FIXED + len(run.run)] = torch.tensor(run.run)
                line[NUM_FIXED + self._max_tokens :][: run.num_accepted] = torch.arange(run.num_accepted)


def decide_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have :class:`TorchSampler` stand for the kernels."""
    module: Any = types.ModuleType("specdec.kernels.triton.sample")
    module.TritonSampler = TorchSampler
    monkeypatch.setitem(sys.modules, module.__name__, module)
