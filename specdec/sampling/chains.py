"""Chains' tokens are drawn inside a recorded step, by kernels whose buffers and input stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.executor.chains import Chosen
from specdec.kernels.sample import SampleStep
from specdec.sampling.on_kernels import KernelSampler, LaidOut, on_device_as
from specdec.sampling.rows import RowGroup, Rows
from specdec.sampling.token_counts import Changes

_NUM_BY_COLUMN = 3
"""The first arrays of a step have a column for each row or sequence, all others a line."""
_WHOLE = ("counts", "prompt_bits", "masks")


class ChainSampler:
    """A :class:`specdec.executor.chains.TokenChooser` for rows that nothing edits.

    Noise and truncation are always in: a row that uses neither leaves them out by itself.

    Args:
        kernels: Lays rows out.
        num_rows: Most rows that are drawn for.
        num_guesses: Most other tokens that are ranked beside each.

    Attributes:
        num_guesses: As given.
    """

    def __init__(self, kernels: KernelSampler, num_rows: int, num_guesses: int) -> None:
        from specdec.kernels.triton.sample import TritonSampler

        self.num_guesses = min(num_guesses, kernels.vocab_size - 1)
        self._kernels, self._num_rows = kernels, num_rows
        device = kernels.editor.device
        self._triton = TritonSampler(kernels.vocab_size, num_rows, num_rows, 1, device)
        self._step: SampleStep | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the device that it holds."""
        return self._triton.num_bytes

    def padding(self) -> list[NDArray[Any]]:
        """The input of no rows. All inputs have its shapes."""
        greedy = SequenceSpec(SamplingParams(temperature=0.0), 0, 1, 1)
        return self._padded(self._kernels.lay_out(Rows([RowGroup(greedy, (0,))])), 0)

    def arrays(self, laid_out: LaidOut) -> list[NDArray[Any]]:
        """The input of some rows, of which nothing but the logits and the noise decides."""
        return self._padded(laid_out, laid_out.rows.num_rows)

    def _padded(self, laid_out: LaidOut, num_rows: int) -> list[NDArray[Any]]:
        padded = []
        for number, values in enumerate(laid_out.arrays[: -1 - len(Changes._fields)]):
            by_column = number < _NUM_BY_COLUMN
            shape = (len(values), self._num_rows) if by_column else (self._num_rows, *values.shape[1:])
            if not len(values):
                shape = values.shape  # masks, of which there are none
            whole = np.full(shape, 0 if number else -1, values.dtype)
            if by_column:
                whole[:, :num_rows] = values[:, :num_rows]
            else:
                whole[:num_rows] = values[:num_rows]
            padded.append(whole)
        return padded

    def begin(self, sent: Sequence[Tensor]) -> None:
        """Take the input, which will be changed in place."""
        self._step = on_device_as(sent, self._kernels.editor.token_counts)

    def choose(self, logits: Tensor, number: Tensor) -> Chosen:
        """Tokens for the first rows.

        Args:
            logits: [N, model's vocabulary].
            number: int64 [], of the pass, which is how many tokens stand behind the input's.
        """
        assert self._step is not None, "begin comes first"
        n = len(logits)
        own = {x.name: getattr(self._step, x.name)[:n] for x in fields(self._step) if x.name not in _WHOLE}
        step, scores = replace(self._step, **own), self._triton.edited[:n] if self.num_guesses else None
        step = replace(step, position=step.position + number)
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches there
            self._triton.decide(logits, step, penalties=False, truncation=True, noise=True, scores=scores)
        tokens = self._triton.chosen[:n].clamp(min=0)  # the model reads those of padding, too
        if scores is None:
            return Chosen(tokens, None, None)
        best, ranked = scores.topk(1 + self.num_guesses, dim=1)
        return Chosen(tokens, ranked.int().masked_fill(~(best > -torch.inf), -1), best)
