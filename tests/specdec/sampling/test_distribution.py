"""The output's distribution is the target's, by chi-square, under both rules; over 200,000 tokens in full.

Every sequence verifies two draft tokens at once. Each decided token is counted under the run before it, and compared
with the target's distribution there: that a run got so far tells nothing about the numbers drawn at its next position,
so the counts are multinomial.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.sampling.acceptance import verify_coupled
from specdec.sampling.noise import gumbel
from specdec.sampling.pipeline import RowGroup, Sampler, VerifiedRun
from specdec.sampling.rejection import NUM_DRAFT_CANDIDATES, propose_truncated, verify_rejection
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
# More tokens than a draft is cut to: what is cut off has a tenth of the mass, and its tokens are the target's too.
WIDE = 48
WIDE_TARGET = torch.randn(WIDE, WIDE, generator=torch.Generator().manual_seed(21))
WIDE_DRAFT = WIDE_TARGET * 0.3 + torch.randn(WIDE, WIDE, generator=torch.Generator().manual_seed(22)) * 0.7
LEAST_EXPECTED = 5.0
Verify = Callable[[Sampler, SamplingParams, float], list[VerifiedRun]]


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


def coupled_runs(sampler: Sampler, params: SamplingParams, bias: float) -> list[VerifiedRun]:
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
    return verify_coupled(chosen.flatten(), groups)


def rejection_runs(sampler: Sampler, params: SamplingParams, bias: float) -> list[VerifiedRun]:
    """The drafter draws with torch's generator from its own distribution, without any of the parameters."""
    generator = torch.Generator().manual_seed(5)
    draft_probs = DRAFT.softmax(1)
    chains = torch.empty(NUM_SEQUENCES, 0, dtype=torch.int64)
    drawn_from = []
    for _ in range(NUM_DRAFTED):
        last = chains[:, -1] if chains.shape[1] else torch.full((NUM_SEQUENCES,), PROMPT[-1])
        drawn_from.append(draft_probs[last])
        chains = torch.cat((chains, drawn_from[-1].multinomial(1, generator=generator)), 1)
    groups = groups_of(params, chains)
    target = sampler.probs(logits_after(TARGET, chains), groups).view(NUM_SEQUENCES, -1, VOCAB)
    certain = torch.nn.functional.one_hot(chains, VOCAB).float()
    kept = unseen(chains.numel(), bias).view(*chains.shape, 1)
    target[:, :NUM_DRAFTED] = torch.where(kept, certain, target[:, :NUM_DRAFTED])
    ids = torch.arange(VOCAB).expand(chains.numel(), -1)
    return verify_rejection(target.flatten(0, 1), groups, ids, torch.stack(drawn_from, 1).flatten(0, 1))


def wide_runs(*, says_what_it_drew_from: bool) -> list[VerifiedRun]:
    """The drafter as it is: its 32 most likely tokens of 48, drawn and sent by the package."""
    sampler = Sampler(WIDE, noise_cache_bytes=0)
    specs = [make_spec(seed=seed) for seed in range(NUM_SEQUENCES)]
    chains = torch.empty(NUM_SEQUENCES, 0, dtype=torch.int64)
    drawn_from = []
    for _ in range(NUM_DRAFTED):
        heads = [RowGroup(spec, [*PROMPT, *chain]) for spec, chain in zip(specs, chains.tolist(), strict=True)]
        logits = logits_after(WIDE_DRAFT, chains[:, -1:]).view(NUM_SEQUENCES, -1, WIDE)[:, -1]
        draft = propose_truncated(sampler, logits, heads)
        assert draft.ids.shape[1] == NUM_DRAFT_CANDIDATES < WIDE
        uncut_probs = logits.softmax(1).gather(1, draft.ids)
        assert 0.02 < 1 - uncut_probs.sum(1).mean() < 0.2
        chains = torch.cat((chains, draft.tokens.unsqueeze(1)), 1)
        drawn_from.append((draft.ids, draft.probs if says_what_it_drew_from else uncut_probs))
    groups = groups_of(SamplingParams(), chains)
    ids, probs = (torch.stack([*parts], 1).flatten(0, 1) for parts in zip(*drawn_from, strict=True))
    return verify_rejection(sampler.probs(logits_after(WIDE_TARGET, chains), groups), groups, ids, probs)


def p_value(runs: Sequence[VerifiedRun], spec: SequenceSpec, table: Tensor = TARGET) -> float:
    """Of the tokens decided after each prefix, under the target's distribution there, in plain Python.

    Tokens that are expected less than five times after a prefix are counted as one.
    """
    vocab_size = len(table)
    counts = Counter(one.run[: i + 1] for one in runs for i in range(min(2, len(one.run))))
    assert counts.total() >= 4 / 3 * NUM_SEQUENCES
    statistic, freedom = 0.0, 0
    for prefix in [(), *itertools.product(range(vocab_size), repeat=1)]:
        tokens = [*PROMPT, *prefix]
        observed = [counts[(*prefix, token)] for token in range(vocab_size)]
        probs = row_probs(table[tokens[-1]].tolist(), spec, tokens)
        possible = [(count, sum(observed) * prob) for count, prob in zip(observed, probs, strict=True) if prob > 0]
        assert sum(count for count, _ in possible) == sum(observed), "a token without probability"
        rare = [each for each in possible if each[1] < LEAST_EXPECTED]
        common = [each for each in possible if each[1] >= LEAST_EXPECTED]
        possible = [*common, (sum(count for count, _ in rare), sum(mean for _, mean in rare))] if rare else common
        if sum(observed) > 0:
            statistic += sum((count - mean) ** 2 / mean for count, mean in possible)
            freedom += len(possible) - 1
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize("verify", [coupled_runs, rejection_runs])
@pytest.mark.parametrize("name", PARAMS)
def test_output_follows_the_target(verify: Verify, name: str) -> None:
    runs = verify(Sampler(VOCAB, noise_cache_bytes=0), PARAMS[name], 0.0)
    outcomes = Counter(run.num_accepted for run in runs)
    assert min(outcomes[n] for n in range(NUM_DRAFTED + 1)) > 0.05 * NUM_SEQUENCES, "not every outcome was tried"
    assert p_value(runs, make_spec(PARAMS[name])) > 1e-3


@pytest.mark.parametrize("verify", [coupled_runs, rejection_runs])
@pytest.mark.parametrize("name", ["plain", pytest.param("penalties", marks=pytest.mark.whole)])
def test_a_biased_rule_is_found_out(verify: Verify, name: str) -> None:
    runs = verify(Sampler(VOCAB, noise_cache_bytes=0), PARAMS[name], BIAS)
    assert p_value(runs, make_spec(PARAMS[name])) < 1e-6


def test_output_follows_the_target_where_the_draft_is_cut_to_32_tokens() -> None:
    runs = wide_runs(says_what_it_drew_from=True)
    outcomes = Counter(run.num_accepted for run in runs)
    assert min(outcomes[n] for n in range(NUM_DRAFTED + 1)) > 0.05 * NUM_SEQUENCES, "not every outcome was tried"
    assert p_value(runs, make_spec(), WIDE_TARGET) > 1e-3


def test_a_draft_that_says_it_was_not_cut_is_found_out() -> None:
    assert p_value(wide_runs(says_what_it_drew_from=False), make_spec(), WIDE_TARGET) < 1e-6


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_texts_over_many_rounds_follow_the_target(rule: str) -> None:
    """Whole generations: what a round leaves over must not lean on the next one."""
    sampler = Sampler(VOCAB)
    logs = [list(PROMPT) for _ in range(sized(600, 2000))]
    specs = [make_spec(seed=seed) for seed in range(len(logs))]
    while min(map(len, logs)) < 30:
        heads = [RowGroup(spec, log) for spec, log in zip(specs, logs, strict=True)]
        drawn_from = []
        for _ in range(NUM_DRAFTED):
            logits = DRAFT[[group.tokens[-1] for group in heads]]
            drawn_from.append(propose_truncated(sampler, logits, heads))
            tokens = drawn_from[-1].tokens if rule == "rejection" else sampler.sample(logits, heads)
            heads = [RowGroup(g.spec, [*g.tokens, t]) for g, t in zip(heads, tokens.tolist(), strict=True)]
        groups = [RowGroup(s, log, tuple(h.tokens[-2:])) for s, log, h in zip(specs, logs, heads, strict=True)]
        logits = TARGET[[token for head in heads for token in head.tokens[-3:]]]
        if rule == "rejection":
            ids, probs = (torch.stack([draft[i] for draft in drawn_from], 1).flatten(0, 1) for i in (1, 2))
            runs = verify_rejection(sampler.probs(logits, groups), groups, ids, probs)
        else:
            runs = verify_coupled(sampler.sample(logits, groups), groups)
        logs = [[*log, *run] for log, (run, *_) in zip(logs, runs, strict=True)]
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for log in logs:
        for pair in itertools.pairwise(log[1:30]):
            counts[pair] += 1
    expected = counts.sum(1, keepdim=True) * TARGET.double().softmax(1)
    assert stats.chi2.sf(((counts - expected) ** 2 / expected).sum().item(), VOCAB * (VOCAB - 1)) > 1e-3
