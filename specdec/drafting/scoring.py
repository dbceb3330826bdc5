"""Which tokens a model chooses along a given text, by reading the text once.

A token is the largest of log probability plus noise, and the noise is a function of seed and position
(:mod:`specdec.sampling.noise`). So one prefill tells what the model chooses at each place, without decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.errors import MemoryPlanError, SequenceFailedError, reason_of
from specdec.core.params import SequenceSpec
from specdec.core.types import Tokens
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.sampling.pipeline import RowGroup, Sampler

CHUNK_TOKENS = 256
_COMPILE_WAIT_S = 0.01


class Scores(NamedTuple):
    """Of an output's first n tokens: all, or up to the first one that its grammar forbids.

    Attributes:
        chosen: int64 [n]: the token that the model chooses after the tokens before.
        gaps: float64 [n]: score of that token less that of the output's, at least 0; infinite if the output's token is
            not allowed. In units of logits over temperature, or of logits with temperature 0.
    """

    chosen: NDArray[np.int64]
    gaps: NDArray[np.float64]


class Scorer:
    """Reads outputs. Used by one thread at a time.

    Args:
        runner: The model with its cache, which needs room for one sequence.
        sampler: Applies each request's parameters.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner, self._sampler = runner, sampler

    def score(self, spec: SequenceSpec, prompt: Tokens, output: Tokens, *, chunk_tokens: int = CHUNK_TOKENS) -> Scores:
        """Score an output's tokens.

        Args:
            spec: The sequence's parameters.
            prompt: At least one token.
            output: At least one token.
            chunk_tokens: Most tokens in a forward pass.

        Raises:
            MemoryPlanError: The cache has no room for it.
            SequenceFailedError: The model's output is not finite, or a grammar or hook fails.
        """
        while not self._sampler.is_ready(spec):
            time.sleep(_COMPILE_WAIT_S)
        if spec.sampling.grammar is not None:  # nothing can be told of what follows a token that it forbids
            output = output[: 1 + len(self._sampler.allowed(spec, np.array(prompt, np.int32), output))]
        chosen, gaps = [], []
        for start, end, logits in self._logits(prompt, output, chunk_tokens):
            group = RowGroup(spec, np.array(prompt + output[:start], np.int32), output[start : end - 1])
            scores = self._sampler.scores(logits, [group])
            for error in self._sampler.take_failures().values():
                raise SequenceFailedError(reason_of(error))
            best = scores.max(1)
            written = scores[range(end - start), output[start:end]]
            chosen.append(best.indices.cpu().numpy())
            gaps.append((best.values - written).double().cpu().numpy())
        return Scores(np.concatenate(chosen), np.concatenate(gaps))

    def _logits(self, prompt: Tokens, output: Tokens, chunk_tokens: int) -> Iterator[tuple[int, int, Tensor]]:
        """For output tokens [start, end), the rows that they were chosen in: float32 [end - start, vocabulary]."""
        tokens, runner = prompt + output[:-1], self._runner
        sequence = runner.new_sequence(salt=None)
        try:
            if not runner.reserve(sequence, len(tokens)):
                raise MemoryPlanError(f"the cache has no room for {len(tokens)} tokens: raise kv_cache_memory")
            for first in range(0, len(tokens), chunk_tokens):
                part = tokens[first : first + chunk_tokens]
                end = first + len(part)
                num_logits = min(len(part), max(0, end - (len(prompt) - 1)))
                logits = runner.forward([RowInput(sequence, part, num_logits)])
                if not bool(runner.is_finite.all()):
                    raise SequenceFailedError("the model's output is not finite")
                if num_logits:
                    yield end - num_logits - len(prompt) + 1, end - len(prompt) + 1, logits
        finally:
            runner.free(sequence)
