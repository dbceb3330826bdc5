"""The output's distribution is the target's, by chi-square; over 200,000 tokens in full.

Every sequence verifies two draft tokens at once. Each decided token is counted under the run before it, and compared
with the target's distribution there: that a run got so far tells nothing about the numbers drawn at its next position,
so the counts are multinomial.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.sampling.acceptance import walk_drafts
from specdec.sampling.noise import gumbel
from specdec.sampling.pipeline import RowGroup, Sampler, VerifiedRun
from tests.sizes import sized

from .reference import make_spec, row_probs

VOCAB, NUM_DRAFTED, NUM_SEQUENCES, BIAS = 6, 2, sized(12_000, 150_000), sized(0.08, 0.02)
"""A bias that is four times as large is seen in a sixteenth of the draws."""
PROMPT = [0, 3]
# Logits after each last token; the two models agree in about half of the mass.
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11))
DRAFT = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(12))
PARAMS = {
    "plain": SamplingParams(),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=1.3, top_k=4),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.4, frequency_penalty=0.3),
}
LEAST_EXPECTED = 5.0


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Half of the time would go into walks over hundreds of thousands of live objects."""
    gc.disable()
    yield
    gc.enable()


def groups_of(params: SamplingParams, chains: Tensor) -> list[RowGroup]:
    """One sequence per chain [N, J], each with a seed of its own."""
    return [RowGroup(make_spec(params, seed), PROMPT, tuple(chain)) for seed, chain in enumerate(chains.tolist())]


def logits_after(table: Tensor, chains: Tensor) -> Tensor:
    """float32 [N * (1 + J), V]: a model's rows after the prompt and each prefix of the chains [N, J]."""
    last = torch.cat((torch.full((len(chains), 1), PROMPT[-1]), chains), 1)
    return table[last].flatten(0, 1)


def unseen(num: int, bias: float) -> Tensor:
    """bool [num]: which draft tokens a biased rule keeps without a test."""
    return torch.rand(num, generator=torch.Generator().manual_seed(0)) < bias


def runs_of(sampler: Sampler, params: SamplingParams, bias: float) -> list[VerifiedRun]:
    """The drafter has the target's noise, but its own logits, and none of the parameters."""
    chains = torch.empty(NUM_SEQUENCES, 0, dtype=torch.int64)
    for position in range(len(PROMPT), len(PROMPT) + NUM_DRAFTED):
        noise = gumbel(range(NUM_SEQUENCES), [position] * NUM_SEQUENCES, VOCAB, "cpu")
        scores = DRAFT[chains[:, -1] if chains.shape[1] else PROMPT[-1]] + noise
        chains = torch.cat((chains, scores.argmax(1, keepdim=True)), 1)
    groups = groups_of(params, chains)
    chosen = sampler.sample(logits_after(TARGET, chains), groups).view(NUM_SEQUENCES, -1)
    kept = unseen(chains.numel(), bias).view(chains.shape)
    chosen[:, :NUM_DRAFTED] = torch.where(kept, chains, chosen[:, :NUM_DRAFTED])
    return walk_drafts(chosen.flatten(), groups)


def p_value(runs: Sequence[VerifiedRun], spec: SequenceSpec) -> float:
    """Of the tokens decided after each prefix, under the target's distribution there, in plain Python.

    Tokens that are expected less than five times after a prefix are counted as one.
    """
    counts = Counter(one.run[: i + 1] for one in runs for i in range(min(2, len(one.run))))
    assert counts.total() >= 4 / 3 * NUM_SEQUENCES
    statistic, freedom = 0.0, 0
    for prefix in [(), *itertools.product(range(VOCAB), repeat=1)]:
        tokens = [*PROMPT, *prefix]
        observed = [counts[(*prefix, token)] for token in range(VOCAB)]
        probs = row_probs(TARGET[tokens[-1]].tolist(), spec, tokens)
        possible = [(count, sum(observed) * prob) for count, prob in zip(observed, probs, strict=True) if prob > 0]
        assert sum(count for count, _ in possible) == sum(observed), "a token without probability"
        rare = [each for each in possible if each[1] < LEAST_EXPECTED]
        common = [each for each in possible if each[1] >= LEAST_EXPECTED]
        possible = [*common, (sum(count for count, _ in rare), sum(mean for _, mean in rare))] if rare else common
        if sum(observed) > 0:
            statistic += sum((count - mean) ** 2 / mean for count, mean in possible)
            freedom += len(possible) - 1
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize("name", PARAMS)
def test_output_follows_the_target(name: str) -> None:
    runs = runs_of(Sampler(VOCAB, noise_cache_bytes=0), PARAMS[name], 0.0)
    outcomes = Counter(run.num_accepted for run in runs)
    assert min(outcomes[n] for n in range(NUM_DRAFTED + 1)) > 0.05 * NUM_SEQUENCES, "not every outcome was tried"
    assert p_value(runs, make_spec(PARAMS[name])) > 1e-3


@pytest.mark.parametrize("name", ["plain", pytest.param("penalties", marks=pytest.mark.whole)])
def test_a_biased_rule_is_found_out(name: str) -> None:
    runs = runs_of(Sampler(VOCAB, noise_cache_bytes=0), PARAMS[name], BIAS)
    assert p_value(runs, make_spec(PARAMS[name])) < 1e-6


def test_texts_over_many_rounds_follow_the_target() -> None:
    """Whole generations: what a round leaves over must not lean on the next one."""
    sampler = Sampler(VOCAB)
    logs = [list(PROMPT) for _ in range(sized(600, 2000))]
    specs = [make_spec(seed=seed) for seed in range(len(logs))]
    while min(map(len, logs)) < 30:
        heads = [RowGroup(spec, log) for spec, log in zip(specs, logs, strict=True)]
        for _ in range(NUM_DRAFTED):
            tokens = sampler.sample(DRAFT[[group.tokens[-1] for group in heads]], heads)
            heads = [RowGroup(g.spec, [*g.tokens, t]) for g, t in zip(heads, tokens.tolist(), strict=True)]
        groups = [RowGroup(s, log, tuple(h.tokens[-2:])) for s, log, h in zip(specs, logs, heads, strict=True)]
        logits = TARGET[[token for head in heads for token in head.tokens[-3:]]]
        runs = walk_drafts(sampler.sample(logits, groups), groups)
        logs = [[*log, *run] for log, (run, *_) in zip(logs, runs, strict=True)]
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for log in logs:
        for pair in itertools.pairwise(log[1:30]):
            counts[pair] += 1
    expected = counts.sum(1, keepdim=True) * TARGET.double().softmax(1)
    assert stats.chi2.sf(((counts - expected) ** 2 / expected).sum().item(), VOCAB * (VOCAB - 1)) > 1e-3
