"""How far the distributions of two models are from each other, on texts that one of them writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner

NUM_TEXTS, NUM_TOKENS = 4, 64


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL divergence in nats over all positions, and the share of positions whose likeliest token is the same."""

    mean_kl: float
    max_kl: float
    same_top: float
    num_tokens: int


def compare(runner: ModelRunner, original: ModelRunner, seed: int = 0) -> Divergence:
    """Read with both models what the original says by itself, at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    kls, same = [], []
    for first in torch.randint(original.vocab_size, (NUM_TEXTS,), generator=generator).tolist():
        text = [first]
        while len(text) < NUM_TOKENS:
            probs = _log_probs(original, text)[-1].exp()
            text.append(int(torch.multinomial(probs, 1, generator=generator)))
        expected, found = _log_probs(original, text), _log_probs(runner, text)
        kls.append((expected.exp() * (expected - found)).sum(-1))
        same.append((expected.argmax(-1) == found.argmax(-1)).float())
    kl = torch.cat(kls)
    return Divergence(kl.mean().item(), kl.max().item(), torch.cat(same).mean().item(), len(kl))


def _log_probs(runner: ModelRunner, text: list[int]) -> torch.Tensor:
    """Log probabilities at all positions: float32 [tokens, vocabulary]."""
    sequence = runner.new_sequence(salt=None)
    try:
        assert runner.reserve(sequence, len(text)), "no room for a text"
        return runner.forward([RowInput(sequence, text, len(text))]).log_softmax(-1)
    finally:
        runner.free(sequence)
