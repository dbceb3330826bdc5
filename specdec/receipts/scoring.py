"""How far each token of an answer is from what the model itself would have chosen, by reading the answer once.

A token is the largest of the scores log probability plus noise, and the noise is a function of
seed and position (:mod:`specdec.sampling.noise`). So one prefill tells of every token what it lacks to the largest
score: nothing, where the answer is the model's own. This is the test of Token-DiFR (Karvonen et al. 2025), and needs no
decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.errors import MemoryPlanError, SequenceFailedError, reason_of
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Progress, Tokens
from specdec.engine.build import BackendOptions, build_target, make_sampler
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource
from specdec.receipts.format import Receipt
from specdec.sampling.pipeline import RowGroup, Sampler

Floats = NDArray[np.float64]
CHUNK_TOKENS = 256
OTHER_CHUNK_TOKENS = 8
"""Of a second reading, whose sums have another order: about as many as a verification has."""
_COMPILE_WAIT_S = 0.01


class Scores(NamedTuple):
    """Of an answer's first n tokens: all, or up to the first one that its grammar forbids.

    Attributes:
        gaps: float64 [n]: largest score less the token's own, at least 0; infinite where the token was not allowed.
            In units of logits over temperature, or of logits with temperature 0.
        best: int64 [n, 2]: the tokens of the two largest scores.
        margins: float64 [n]: largest score less the second.
        logprobs: float64 [n]: of the tokens, by the model alone.
    """

    gaps: Floats
    best: NDArray[np.int64]
    margins: Floats
    logprobs: Floats


class Scorer:
    """Reads answers. Used by one thread at a time.

    Args:
        runner: The target with its cache; it needs room for one answer.
        sampler: Applies each request's parameters.

    Attributes:
        calibration_tokens: So many tokens are read twice, to measure the rounding.
    """

    calibration_tokens = 1 << 14

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner, self._sampler = runner, sampler

    @classmethod
    def from_pretrained(cls, source: ModelSource, options: BackendOptions, progress: Progress | None = None) -> Scorer:
        """Load a model; takes and raises what :func:`specdec.engine.build.build_target` does."""
        _, built = build_target(source, options, progress)
        sampler = make_sampler(source, built.runner.vocab_size, built.loaded.eos_token_ids, options)
        return cls(built.runner, sampler)

    def refusal(self, receipt: Receipt) -> str:
        """Why it cannot read a receipt's answer; empty where it can."""
        return ""

    def score(
        self,
        spec: SequenceSpec,
        prompt: Tokens,
        output: Tokens,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        pairs: NDArray[np.int64] | None = None,
        slack: float = 0.0,
    ) -> Scores:
        """Score an output's tokens.

        Args:
            spec: The sequence's parameters.
            prompt: At least one token.
            output: At least one token.
            chunk_tokens: Most tokens in a forward pass.
            pairs: int64 [n, 2], in place of the best two: the gaps are those of the first, margins first less second.
            slack: By so much, relatively, the bounds of top-p, min-p and top-k may be moved in a token's favor.

        Raises:
            MemoryPlanError: The cache has no room for it.
            SequenceFailedError: The model's output is not finite, or a grammar or hook fails.
        """
        while not self._sampler.is_ready(spec):
            time.sleep(_COMPILE_WAIT_S)
        if spec.sampling.grammar is not None:  # nothing can be told of what follows a token that it forbids
            output = output[: 1 + len(self._sampler.allowed(spec, np.array(prompt, np.int32), output))]
        parts = [
            self._of_rows(spec, prompt + output[:start], output[start:end], logits, pairs, start, slack)
            for start, end, logits in self._logits(prompt, output, chunk_tokens)
        ]
        return Scores(*(np.concatenate(each) for each in zip(*parts, strict=True)))

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

    def _of_rows(
        self,
        spec: SequenceSpec,
        before: Tokens,
        tokens: Tokens,
        logits: Tensor,
        pairs: NDArray[np.int64] | None,
        start: int,
        slack: float,
    ) -> tuple[Floats, NDArray[np.int64], Floats, Floats]:
        draft = tokens[:-1]
        scores = self._scores(spec, before, draft, logits)
        written = torch.tensor(tokens, device=scores.device)[:, None]
        logprobs = logits.double().log_softmax(1).gather(1, written)[:, 0]
        if pairs is not None:
            best = torch.from_numpy(pairs[start : start + len(tokens)]).to(scores.device)
            values = scores.gather(1, best)
            gaps = scores.amax(1) - values[:, 0]
        else:
            values, best = scores.topk(2, dim=1)
            gaps = values[:, 0] - scores.gather(1, written)[:, 0]
            if slack and bool((gaps > 0).any()):
                for params in moved_bounds(spec.sampling, slack):
                    other = self._scores(replace(spec, sampling=params), before, draft, logits)
                    gaps = torch.minimum(gaps, other.amax(1) - other.gather(1, written)[:, 0])
        return (
            gaps.double().cpu().numpy(),
            best.cpu().numpy(),
            (values[:, 0] - values[:, 1]).double().cpu().numpy(),
            logprobs.cpu().numpy(),
        )

    def _scores(self, spec: SequenceSpec, before: Tokens, draft: Tokens, logits: Tensor) -> Tensor:
        group = RowGroup(spec, np.array(before, np.int32), draft)
        scores = self._sampler.scores(logits, [group])
        for error in self._sampler.take_failures().values():
            raise SequenceFailedError(reason_of(error))
        return scores


def moved_bounds(params: SamplingParams, slack: float) -> Sequence[SamplingParams]:
    """Parameters that keep somewhat more tokens, and somewhat fewer; none where nothing is truncated."""
    if params.is_greedy or (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0):
        return ()
    moved = []
    for sign in (1, -1):
        top_k = max(1, params.top_k + sign) if params.top_k else 0
        top_p = min(1.0, params.top_p + sign * slack) if params.top_p < 1 else 1.0
        min_p = min(1.0, params.min_p * (1 - sign * slack))
        moved.append(replace(params, top_k=top_k, top_p=max(top_p, 1e-9), min_p=min_p))
    return moved
