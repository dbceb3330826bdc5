"""What a step of a model takes; what quantization costs it, and saves: against the same model as it was."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner

NUM_TEXTS = 4
NUM_TOKENS = 64
"""Of each text."""


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """A quantized model beside its original.

    Attributes:
        original_bytes: Of the original's weights.
        mean_kl: KL divergence of the next token's distribution from the original's, in nats, over all positions.
        max_kl: The largest of one position.
        same_top: Share of positions whose likeliest token is the original's.
        num_tokens: Positions compared.
        step_s: Time of a step of one token.
        original_step_s: The same of the original.
    """

    original_bytes: int
    mean_kl: float
    max_kl: float
    same_top: float
    num_tokens: int
    step_s: float
    original_step_s: float


def compare(runner: ModelRunner, original: ModelRunner, seed: int = 0) -> QuantizationReport:
    """Read the same texts with both models: what the original says by itself, at temperature 1.

    Args:
        runner: Of the quantized model; its cache has room for a text, as the original's has for four at once.
        original: Of the model as it was.
        seed: Of the texts.
    """
    texts = _texts(original, seed)
    kls, same, steps_s, original_steps_s = [], [], list[float](), list[float]()
    for text in texts:
        expected, original_took_s = _read(original, text)
        found, took_s = _read(runner, text)
        found = found.to(expected.device)
        kls.append((expected.exp() * (expected - found)).sum(-1))
        same.append((expected.argmax(-1) == found.argmax(-1)).float())
        steps_s += took_s
        original_steps_s += original_took_s
    kl = torch.cat(kls)
    return QuantizationReport(
        original_bytes=original.loaded.weights_bytes,
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        same_top=torch.cat(same).mean().item(),
        num_tokens=len(kl),
        step_s=statistics.median(steps_s),
        original_step_s=statistics.median(original_steps_s),
    )


def median_step_s(runner: ModelRunner, seed: int = 0) -> float:
    """Seconds of a step of one token, the median over half of a random text; its cache has room for that text."""
    length = min(NUM_TOKENS, runner.loaded.max_model_len)
    text = torch.randint(runner.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return statistics.median(_read(runner, text)[1])


def _texts(runner: ModelRunner, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    length = min(NUM_TOKENS, runner.loaded.max_model_len)
    texts = torch.randint(runner.vocab_size, (NUM_TEXTS, 1), generator=generator).tolist()
    sequences = [runner.new_sequence(salt=None) for _ in texts]
    try:
        while len(texts[0]) < length:
            for sequence, text in zip(sequences, texts, strict=True):
                assert runner.reserve(sequence, len(text)), "no room for the texts"
            rows = [RowInput(sequence, text[-1:], 1) for sequence, text in zip(sequences, texts, strict=True)]
            probs = runner.forward(rows).softmax(-1).cpu()
            for text, (token,) in zip(texts, torch.multinomial(probs, 1, generator=generator).tolist(), strict=True):
                text.append(token)
    finally:
        for sequence in sequences:
            runner.free(sequence)
    return texts


def _read(runner: ModelRunner, text: list[int]) -> tuple[torch.Tensor, list[float]]:
    """Log-probabilities at all positions, float32 [tokens, vocabulary], and the times of steps of one token."""
    sequence, times_s, half = runner.new_sequence(salt=None), [], len(text) // 2
    try:
        assert runner.reserve(sequence, half), "no room for a text"
        logits = [runner.forward([RowInput(sequence, text[:half], half)])]
        for token in text[half:]:
            assert runner.reserve(sequence, len(sequence) + 1), "no room for a text"
            started_s = time.perf_counter()
            logits.append(runner.forward([RowInput(sequence, [token], 1)]))
            logits[-1][0, 0].item()  # when it is there
            times_s.append(time.perf_counter() - started_s)
        return torch.cat(logits).log_softmax(-1), times_s
    finally:
        runner.free(sequence)
