"""What the sampling package must compute, one row and one token at a time, in float64 and plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.sampling.pipeline import RowGroup, Sampler

NO_TOKEN = -1


def make_spec(params: SamplingParams | None = None, seed: int = 0, **fields: object) -> SequenceSpec:
    values = {"output_start": 1, "max_tokens": 1000} | fields
    return SequenceSpec(params or SamplingParams(), seed, **values)  # type: ignore[arg-type]


def edited_row(logits: Sequence[float], spec: SequenceSpec, tokens: Sequence[int]) -> list[float]:
    """Biases, penalties, bans and min_tokens on the row that follows ``tokens``."""
    params, output = spec.sampling, list(tokens[spec.output_start :])
    row = list(logits)
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in range(len(row)):
        if token in tokens:
            divides = row[token] > 0
            row[token] = row[token] / params.repetition_penalty if divides else row[token] * params.repetition_penalty
        row[token] -= params.frequency_penalty * output.count(token)
        row[token] -= params.presence_penalty * (token in output)
    if params.allowed_token_ids:
        row = [value if token in set(params.allowed_token_ids) else -math.inf for token, value in enumerate(row)]
    if len(output) < params.min_tokens:
        for token in spec.ending_token_ids:
            row[token] = -math.inf
    banned = {word[-1] for word in params.bad_words if output[len(output) - len(word) + 1 :] == [*word[:-1]]}
    left = [-math.inf if token in banned else value for token, value in enumerate(row)]
    return row if max(left) == -math.inf else left


def probs_of(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """The distribution that the sampler draws each row from, float32 [N, V]; on one token with temperature 0."""
    drawn_from = sampler._drawn_from(logits, sampler._laid_out(logits, groups))
    is_greedy = [group.spec.sampling.is_greedy for group in groups for _ in range(1 + len(group.draft))]
    certain = torch.zeros_like(drawn_from).scatter_(1, drawn_from.argmax(1, keepdim=True), 1.0)
    return torch.where(torch.tensor(is_greedy, dtype=torch.bool).unsqueeze(1), certain, drawn_from.softmax(1))


def normalised(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def row_probs(logits: Sequence[float], spec: SequenceSpec, tokens: Sequence[int]) -> list[float]:
    """The distribution of the token after ``tokens``; no row of the tests has ties."""
    params, row = spec.sampling, edited_row(logits, spec, tokens)
    if params.temperature == 0:
        return [float(token == row.index(max(row))) for token in range(len(row))]
    top = max(row)
    probs = normalised([math.exp((value - top) / params.temperature) for value in row])
    order = sorted(range(len(row)), key=lambda token: -probs[token])
    kept = order[: params.top_k or None]
    mass, total = 0.0, sum(probs[token] for token in kept)
    nucleus = []
    for token in kept:
        if mass < params.top_p * total or params.top_p == 1:
            nucleus.append(token)
        mass += probs[token]
    kept = [token for token in nucleus if probs[token] >= params.min_p * probs[order[0]]]
    return normalised([prob if token in kept else 0.0 for token, prob in enumerate(probs)])


def random_params(rng: random.Random, vocab_size: int, **fields: object) -> SamplingParams:
    """Every parameter on in about half of the cases."""

    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.5 else off

    values: dict[str, object] = {
        "repetition_penalty": maybe(rng.uniform(0.7, 1.6), 1.0),
        "presence_penalty": maybe(rng.uniform(-1, 1), 0.0),
        "frequency_penalty": maybe(rng.uniform(-1, 1), 0.0),
        "logit_bias": maybe(tuple((t, rng.uniform(-3, 3)) for t in rng.sample(range(vocab_size), 3)), ()),
        "allowed_token_ids": SharedTokens(maybe(rng.sample(range(vocab_size), vocab_size - 4), ())),
        "bad_words": maybe(tuple(tuple(rng.choices(range(vocab_size), k=n)) for n in (1, 2, 2, 2, 2, 3)), ()),
        "min_tokens": maybe(rng.randrange(12), 0),
        "temperature": maybe(rng.uniform(0.3, 1.5), 1.0),
        "top_k": maybe(rng.randrange(1, vocab_size + 3), 0),
        "top_p": maybe(rng.uniform(0.2, 0.99), 1.0),
        "min_p": maybe(rng.uniform(0.01, 0.3), 0.0),
        "stop_token_ids": maybe((1, 2), ()),
    }
    return SamplingParams(**(values | fields))  # type: ignore[arg-type]


class TableModel:
    """A model whose logits depend on the last token and the length modulo 3."""

    def __init__(self, vocab_size: int, seed: int, spread: float = 2.0) -> None:
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(3, vocab_size, vocab_size, generator=generator) * spread

    def row(self, tokens: Sequence[int]) -> Tensor:
        return self.table[len(tokens) % 3, tokens[-1]]

    def rows(self, groups: Sequence[RowGroup]) -> Tensor:
        """float32 [N, V], as a forward pass over the groups would give."""
        return torch.stack(
            [self.row([*group.tokens, *group.draft[:i]]) for group in groups for i in range(len(group.draft) + 1)]
        )


def plain_decoding(sampler: Sampler, model: TableModel, spec: SequenceSpec, prompt: list[int], count: int) -> list[int]:
    """The next ``count`` tokens, one at a time, alone in the batch, without drafts."""
    tokens = list(prompt)
    for _ in range(count):
        group = RowGroup(spec, tokens)
        tokens = [*tokens, *sampler.sample(model.rows([group]), [group]).tolist()]
    return tokens[len(prompt) :]
