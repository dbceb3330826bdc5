"""Recordings that a draft can learn, and such as nobody can."""

from __future__ import annotations

import random
from collections.abc import Sequence

from specdec import SamplingParams
from specdec.audition.recording import Sample

OUTPUT_TOKENS = 12


def cycles(num_samples: int, seed: int = 0) -> list[Sample]:
    """Answers that go on counting from their prompt's last token, of many lengths."""
    chosen = random.Random(seed)
    samples = []
    for _ in range(num_samples):
        prompt = [chosen.randrange(40, 60) for _ in range(chosen.randrange(2, 9))]
        output = [40 + (prompt[-1] + i) % 20 for i in range(1, 1 + OUTPUT_TOKENS - chosen.randrange(6))]
        samples.append(sample(prompt, output))
    return samples


def shuffled(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """The same prompts, each with the answer to another one in another order."""
    chosen = random.Random(seed)
    outputs = [chosen.sample(one.output_token_ids, len(one.output_token_ids)) for one in samples]
    chosen.shuffle(outputs)
    return [sample(one.prompt_token_ids, output) for one, output in zip(samples, outputs, strict=True)]


def sample(prompt: Sequence[int], output: Sequence[int]) -> Sample:
    return Sample(tuple(prompt), tuple(output), OUTPUT_TOKENS, SamplingParams(temperature=0.0), system_fingerprint="fp")
