"""Prefixes that are shared change no token, and guesses are ranked as tokens are chosen."""

import random

import pytest
import torch

from specdec.core.params import SamplingParams
from specdec.engine.target import ModelTarget
from specdec.sampling.acceptance import propose
from specdec.sampling.noise import gumbel
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.sizes import some
from tests.specdec.engine.pairs import Case, make_service, run

PROMPT = (5, 9, 77, 31)


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
def test_edge_15_shared_prefixes_change_no_token(temperature: float) -> None:
    """The second of two equal prompts is read from the cache, and so is one that goes on differently."""
    rng = random.Random(2)
    prompt = tuple(rng.randrange(3, 128) for _ in range(37))
    sampling = SamplingParams(temperature=temperature)
    cases = [Case(prompt, 12, sampling, 1), Case((*prompt[:30], 7, 8), 12, sampling, 2), Case(prompt, 12, sampling, 1)]
    alone = [run(make_service("mistral", 0.1, 3), [case])[0][0] for case in cases]
    service = make_service("mistral", 0.1, 3)
    assert [run(service, [case])[0][0] for case in cases] == alone
    backend = service.target._backend
    assert isinstance(backend, ModelTarget)
    gauges = backend.metrics()
    assert gauges["num_reused_tokens"] == 28 + 36
    assert gauges["kv_blocks_in_use"] == gauges["num_cached_sequences"] == 0


def guesses_for(sampling: SamplingParams, count: int, seed: int = 3) -> tuple[int, tuple[int, ...], torch.Tensor]:
    """What is drawn and guessed in the middle of a batch of all kinds, and the row's logits."""
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(seed))
    others = SamplingParams(temperature=0.0), SamplingParams(top_p=0.9)
    groups = [RowGroup(Case(PROMPT, 9, s, seed).spec(), [*PROMPT]) for s in (others[0], sampling, others[1])]
    drawn = propose(Sampler(50), logits, groups, count)
    assert [one.token for one in drawn] == [one.token for one in propose(Sampler(50), logits, groups)]
    return drawn[1].token, drawn[1].guesses, logits[1, :50]


@pytest.mark.parametrize("count", [1, 4, 60])
def test_guesses_are_ranked_as_tokens_are_chosen(count: int) -> None:
    for seed in range(5):
        token, guesses, logits = guesses_for(SamplingParams(temperature=0.7), count, seed)
        noised = logits / 0.7 + gumbel([seed], [len(PROMPT)], 50, "cpu")[0]
        assert [token, *guesses] == noised.argsort(descending=True).tolist()[: count + 1]


def test_with_temperature_zero_guesses_are_the_next_best() -> None:
    token, guesses, logits = guesses_for(SamplingParams(temperature=0.0), 4)
    assert [token, *guesses] == logits.argsort(descending=True).tolist()[:5]


def test_nothing_is_guessed_that_cannot_be_said() -> None:
    token, guesses, logits = guesses_for(SamplingParams(top_k=3), 10)
    assert {token, *guesses} == set(logits.argsort(descending=True).tolist()[:3])
    assert len(guesses) == 2


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
def test_guesses_come_with_their_likelihoods(temperature: float) -> None:
    logits = torch.randn(1, 50)
    groups = [RowGroup(Case(PROMPT, 9, SamplingParams(temperature=temperature)).spec(), [1])]
    (drawn,) = propose(Sampler(50), logits, groups, 5)
    assert len(drawn.likelihoods) == 1 + len(drawn.guesses) == 6
    assert list(drawn.likelihoods) == sorted(drawn.likelihoods, reverse=True)
    assert sum(drawn.likelihoods) == pytest.approx(1)
    if not temperature:
        (sharper,) = propose(Sampler(50), 4 * logits, groups, 5)
        assert sharper.likelihoods[0] > drawn.likelihoods[0]
