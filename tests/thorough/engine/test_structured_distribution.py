"""Constrained texts have the target's own distribution, renormalised token by token over what the grammar allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdec.core.backends import VerifyJob
from specdec.core.grammar import Grammar
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Tokens
from specdec.engine.target import with_allowed_draft
from specdec.sampling.acceptance import decide, propose
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.structured.compiler import Grammars
from tests.sizes import sized

EOS, LETTERS = 0, "abcde"
V, NUM_DRAFTED = 1 + len(LETTERS), 3
PROMPT = [3]
TARGET = torch.randn(V, V, generator=torch.Generator().manual_seed(11))
DRAFT = 0.6 * TARGET + 0.6 * torch.randn(V, V, generator=torch.Generator().manual_seed(12))
GRAMMAR = Grammar("regex", "([ab]|c[de]{1,3})ba[abe]{1,2}d?")


def grammars() -> Grammars:
    """Of a tokenizer whose tokens are five letters and an end."""
    tokenizer = Tokenizer(models.BPE({"<eos>": EOS} | {letter: 1 + i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return Grammars(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"), V, (EOS,))


def texts(count: int, *, masks_drafts: bool) -> Counter[Tokens]:
    """How often each text came, of ``count``; drafts are three tokens of a model that often means something else."""
    sampler = Sampler(V, noise_cache_bytes=0, grammars=grammars())
    params = SamplingParams(grammar=GRAMMAR)
    specs = [SequenceSpec(params, seed, len(PROMPT), 50, (EOS,)) for seed in range(count)]
    assert sampler.matchers is not None
    while not sampler.is_ready(specs[0]):
        pass
    logs, counts = {seed: TokenLog(PROMPT) for seed in range(count)}, Counter[Tokens]()
    while logs:
        seeds = list(logs)
        chains: list[list[int]] = [[] for _ in seeds]
        in_draft = specs if masks_drafts else [replace(s, sampling=replace(s.sampling, grammar=None)) for s in specs]
        for _ in range(NUM_DRAFTED):
            groups = [RowGroup(in_draft[s], [*logs[s].tokens, *chain]) for s, chain in zip(seeds, chains, strict=True)]
            drawn = propose(sampler, DRAFT[[group.tokens[-1] for group in groups]], groups)
            for chain, one in zip(chains, drawn, strict=True):
                chain.append(one.token)
        jobs = []
        for seed, chain in zip(seeds, chains, strict=True):
            job = VerifyJob("", logs[seed], tuple(chain), specs[seed], "chain", room=NUM_DRAFTED)
            jobs.append(with_allowed_draft(sampler, job))
        groups = [RowGroup(job.spec, job.log.tokens, job.draft) for job in jobs]
        last = [token for group in groups for token in (group.tokens[-1], *group.draft)]
        for seed, (run, *_) in zip(seeds, decide(sampler, TARGET[last], groups).runs, strict=True):
            ended = run.index(EOS) + 1 if EOS in run else None
            logs[seed].extend(run[:ended])
            if ended is not None:
                counts[logs.pop(seed).tail(len(PROMPT))] += 1
        assert not sampler.take_failures()
    return counts


def exact() -> dict[Tokens, float]:
    """The probability of every text that the grammar describes."""
    matcher, found = grammars().compiled(GRAMMAR, (EOS,)).result(), dict[Tokens, float]()
    pending: list[tuple[Tokens, float]] = [((), 1.0)]
    while pending:
        text, weight = pending.pop()
        if text and text[-1] == EOS:
            found[text] = weight
            continue
        own = matcher.deep_copy()
        assert own.try_consume_tokens(list(text)) == len(text)
        bits = own.compute_bitmask()[0]
        row = TARGET[text[-1] if text else PROMPT[-1]].double()
        forbidden = torch.tensor([not bits >> token & 1 for token in range(V)])
        probs = row.masked_fill(forbidden, -torch.inf).softmax(0).tolist()
        pending += [((*text, token), weight * prob) for token, prob in enumerate(probs) if prob > 0]
    assert sum(found.values()) == pytest.approx(1)
    return found


def p_value(counts: Counter[Tokens]) -> float:
    """Of the texts that came; those that are expected less than five times are counted as one."""
    expected = {text: counts.total() * prob for text, prob in exact().items()}
    assert counts.keys() <= expected.keys()
    common = {text: mean for text, mean in expected.items() if mean >= 5}
    observed = [counts[text] for text in common] + [sum(n for text, n in counts.items() if text not in common)]
    means = [*common.values(), sum(mean for text, mean in expected.items() if text not in common)]
    if means[-1] == 0:
        observed, means = observed[:-1], means[:-1]
    return float(stats.chisquare(observed, means, sum_check=False).pvalue)


@pytest.mark.parametrize("masks_drafts", [True, False], ids=["masked drafts", "drafts without masks"])
def test_texts_follow_the_target(masks_drafts: bool) -> None:
    count = sized(1_000, 60_000)
    counts = texts(count, masks_drafts=masks_drafts)
    num_tokens = sum(len(text) * number for text, number in counts.items())
    print(f"{num_tokens} tokens, p = {p_value(counts):.3f}")
    assert num_tokens > 3.4 * count  # over 200,000 in the long run
    assert p_value(counts) > 1e-3
