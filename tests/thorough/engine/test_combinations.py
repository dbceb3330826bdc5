"""All features at once, behind a hostile network: what each pair of them would do is among it, and no token changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from specdec.core.params import SamplingParams
from specdec.core.types import TokenLogprobs
from specdec.drafting.eagle3.heads import load
from specdec.drafting.heads import DraftHeads
from specdec.drafting.ngram import NgramOptions
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.drafting.eagle3_folders import write_eagle3
from tests.specdec.drafting.test_eagle3 import model_of, said
from tests.specdec.engine.pairs import MAX_MODEL_LEN, Case, Output, collect
from tests.specdec.engine.test_hostile_network import DRAFTER, TARGET, HostileService, runner
from tests.specdec.engine.test_processors import BOTH
from tests.specdec.models.recurrent_families import VOCAB_SIZE
from tests.thorough.engine.test_heads import fitted
from tests.thorough.engine.test_ngram import edited
from tests.thorough.engine.test_recurrent import NOISE

EVERYTHING = SamplingParams(
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias=((7, 1.0), (9, -1.0)),
    bad_words=((7, 7), (20,)),
    ignore_eos=True,
    logprobs=2,
)
SCARCE_BLOCKS = 30
"""Of four tokens each: not for two of the sequences below at their full length."""
CHUNK = 16
RESTART_RATE = 0.02
SEEDS = (1, 2, 3)
HAPPENED = ("promoted", "accepted", "looked up", "of heads", "evicted", "reused", "restarted")


@lru_cache
def eagle3(family: str) -> DraftHeads:
    """A head that caches what it reads, in the target's blocks."""
    with TemporaryDirectory() as folder:
        path = write_eagle3(Path(folder), model_of(family), said(family), draft_vocab_size=100)
        return load(path, prepare_model(model_of(family), "tiny"))


def make_cases(sampling: SamplingParams) -> list[Case]:
    """Prompts of several chunks that begin alike."""
    rng = random.Random(8)
    shared, *own = ([rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (24, 3, 20, 9, 1))
    return [Case((*shared, *tail), 30, sampling, seed=i) for i, tail in enumerate(own)]


def entries(output: Output) -> list[TokenLogprobs]:
    return list(output.notes.logprobs or ())


def assert_same(got: Output, want: Output, where: str) -> None:
    assert got.tokens == want.tokens, where
    assert len(entries(got)) == len(entries(want)) == len(want.tokens)
    for ours, theirs in zip(entries(got), entries(want), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize(
    ("family", "temperature", "heads_of"),
    [
        ("llama", 0.0, fitted),
        ("llama", 1.0, fitted),
        ("qwen3_5", 1.0, fitted),
        ("qwen3_5", 0.0, fitted),
        ("llama", 0.0, eagle3),
        ("llama", 1.0, eagle3),
        ("qwen3_5", 1.0, eagle3),
    ],
)
def test_all_at_once_no_token_changes(family: str, temperature: float, heads_of: Callable[[str], DraftHeads]) -> None:
    """Branches, n-grams, heads, trees, chunks, reuse, preemption, hooks, penalties, logprobs, workers that restart."""
    cases = make_cases(replace(EVERYTHING, temperature=temperature))
    lengths = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}
    target = ModelTarget(runner(family, 0.0), Sampler(VOCAB_SIZE, BOTH), **lengths)
    wanted = collect(InProcessService(target, None, 0), cases)
    makers = partial(runner, family, 0.0, SCARCE_BLOCKS, heads_of(family)), partial(runner, family, NOISE)
    # Two have something to find, two have the draft model alone.
    for i in (0, 1):
        cases[i] = replace(cases[i], prediction=edited(wanted[i].tokens, random.Random(i)))
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        heads = heads_of(family), 3, 12 * (seed % 2)
        service = HostileService(*makers, seed, BOTH, CHUNK, RESTART_RATE, ngram=NgramOptions(4), heads=heads)
        for got, want in zip(collect(service, cases), wanted, strict=True):
            assert_same(got, want, f"seed {seed}")
        service.count(TARGET)
        service.count(DRAFTER)
        counts += service.counts
    counts["restarted"] = counts["T restarted"] + counts["D restarted"]
    assert [what for what in HAPPENED if not counts[what]] == [], "the schedules are too kind"
