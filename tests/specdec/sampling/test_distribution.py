"""The output's distribution is the target's, by chi-square at 200,000 sequences, under both rules.

A context is the last token. Every sequence verifies two draft tokens; each decided token is counted under the prefix of
the run before it, and compared with the target's distribution after that prefix. That a run got so far tells nothing
about the noise at its next position, so the counts are multinomial.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from torch import Tensor

from specdec.sampling.coupled import verify_coupled
from specdec.sampling.params import SamplingParams, SequenceSpec
from specdec.sampling.pipeline import RowGroup, Sampler, VerifiedRun
from specdec.sampling.rejection import propose_truncated, verify_rejection

from .reference import make_spec, row_probs

VOCAB, PROMPT, NUM_SEQUENCES, BIAS = 6, [0, 3], 200_000, 0.02
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11))
DRAFT = TARGET + 0.9 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(12))
PARAMS = {
    "plain": SamplingParams(),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=1.3, top_k=4),
    "min_p": SamplingParams(temperature=1.3, min_p=0.2),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.4, frequency_penalty=0.3),
    "all": SamplingParams(temperature=0.9, top_k=5, top_p=0.95, presence_penalty=0.5, logit_bias=((2, 0.7),)),
}


@dataclass
class Batch:
    """Sequences that differ in nothing but their seeds; chains grow together."""

    specs: list[SequenceSpec]
    sampler: Sampler

    def groups(self, chains: Tensor) -> list[RowGroup]:
        """Heads at the end of chains [N, J]."""
        return [RowGroup(spec, PROMPT + chain) for spec, chain in zip(self.specs, chains.tolist(), strict=True)]

    def with_drafts(self, chains: Tensor) -> list[RowGroup]:
        return [RowGroup(spec, PROMPT, tuple(chain)) for spec, chain in zip(self.specs, chains.tolist(), strict=True)]


def logits_after(table: Tensor, chains: Tensor) -> Tensor:
    """float32 [N * (1 + J), V]: a model's rows after the prompt and each prefix of the chains [N, J]."""
    last = torch.cat((torch.full((len(chains), 1), PROMPT[-1]), chains), 1)
    return table[last].flatten(0, 1)


def coupled_runs(batch: Batch, bias: float) -> list[VerifiedRun]:
    chains = torch.empty(len(batch.specs), 0, dtype=torch.int64)
    for _ in range(2):
        logits = logits_after(DRAFT, chains).unflatten(0, (len(chains), -1))[:, -1]
        chains = torch.cat((chains, batch.sampler.choose(logits, batch.groups(chains)).unsqueeze(1)), 1)
    groups = batch.with_drafts(chains)
    chosen = batch.sampler.choose(logits_after(TARGET, chains), groups).unflatten(0, (len(groups), 3))
    # A biased rule: a share of the first draft tokens passes unseen.
    unseen = torch.arange(len(groups)) < bias * len(groups)
    chosen[unseen, 0] = chains[unseen, 0]
    return verify_coupled(chosen.flatten(), groups)


def rejection_runs(batch: Batch, bias: float) -> list[VerifiedRun]:
    chains = torch.empty(len(batch.specs), 0, dtype=torch.int64)
    drafts = []
    for _ in range(2):
        logits = logits_after(DRAFT, chains).unflatten(0, (len(chains), -1))[:, -1]
        drafts.append(propose_truncated(batch.sampler, logits, batch.groups(chains)))
        chains = torch.cat((chains, drafts[-1].tokens.unsqueeze(1)), 1)
    groups = batch.with_drafts(chains)
    target = batch.sampler.probs(logits_after(TARGET, chains), groups)
    # A biased rule: the target's probabilities lean towards the draft's.
    lean = batch.sampler.probs(logits_after(DRAFT, chains), groups)
    ids, probs = (
        torch.stack(parts, 1).flatten(0, 1) for parts in zip(*((d.ids, d.probs) for d in drafts), strict=True)
    )
    return verify_rejection(target.lerp(lean, bias), groups, ids, probs)


def p_value(runs: list[VerifiedRun], spec: SequenceSpec) -> float:
    """Of the tokens decided after every prefix, under the target's own distribution."""
    counts = Counter(run.run[: i + 1] for run in runs for i in range(len(run.run)))
    statistic, freedom = 0.0, 0
    for length in range(3):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            observed = [counts[(*prefix, token)] for token in range(VOCAB)]
            expected = [
                sum(observed) * p for p in row_probs(TARGET[[*PROMPT, *prefix][-1]].tolist(), spec, [*PROMPT, *prefix])
            ]
            assert all(count == 0 for count, mean in zip(observed, expected, strict=True) if mean == 0)
            cells = [cell for cell in zip(observed, expected, strict=True) if cell[1] >= 5]
            if len(cells) == VOCAB - expected.count(0.0) > 1:
                statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
                freedom += len(cells) - 1
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize("rule", [coupled_runs, rejection_runs])
@pytest.mark.parametrize("name", PARAMS)
def test_output_follows_the_target(rule: Callable[[Batch, float], list[VerifiedRun]], name: str) -> None:
    specs = [make_spec(PARAMS[name], seed, output_start=1) for seed in range(NUM_SEQUENCES)]
    runs = rule(Batch(specs, Sampler(VOCAB)), 0.0)
    accepted = Counter(run.num_accepted for run in runs)
    assert min(accepted[n] for n in range(3)) > 0.05 * NUM_SEQUENCES, "the test needs all outcomes"
    assert p_value(runs, specs[0]) > 1e-3


@pytest.mark.parametrize("rule", [coupled_runs, rejection_runs])
def test_a_rule_biased_by_2_percent_is_found_out(rule: Callable[[Batch, float], list[VerifiedRun]]) -> None:
    specs = [make_spec(PARAMS["plain"], seed, output_start=1) for seed in range(NUM_SEQUENCES)]
    assert p_value(rule(Batch(specs, Sampler(VOCAB)), BIAS), specs[0]) < 1e-6
