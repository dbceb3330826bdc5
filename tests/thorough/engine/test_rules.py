"""Both acceptance rules through the whole engine: what travels with a draft, and prefixes that are shared."""

import random

import pytest
import torch
from scipy.stats import chisquare

from specdec.core.messages import Candidates
from specdec.core.params import Acceptance, SamplingParams
from specdec.engine.target import ModelTarget
from specdec.sampling.acceptance import propose
from specdec.sampling.noise import gumbel
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.sizes import some
from tests.specdec.engine.pairs import Case, assert_same, greedy, make_model, make_service, run
from tests.specdec.engine.test_exactness import HALF_RIGHT, make_cases

NOISE = HALF_RIGHT["llama"]
PROMPT = (5, 9, 77, 31)
NUM_DRAWS = 2_500


def test_the_rejection_rule_at_temperature_zero_is_greedy() -> None:
    stock = make_model("llama")
    cases = make_cases(SamplingParams(temperature=0.0, acceptance="rejection"))
    outputs, stats = run(make_service("llama", NOISE, 4), cases)
    for got, case in zip(outputs, cases, strict=True):
        assert_same(got, greedy(stock, case), case, stock)
    assert stats.acceptance_rate > 0.2


def second_token_p_value(*, is_broken: bool = False) -> float:
    """Chi-square of the second output token, which was drafted, against the target's own distribution."""
    model = make_model("llama")
    sampling = SamplingParams(temperature=1.0, acceptance="rejection", ignore_eos=True)
    cases = [Case(PROMPT, 3, sampling, seed=i) for i in range(NUM_DRAWS)]
    service = make_service("llama", NOISE, 2, num_blocks=3000, chunk=2048)
    if is_broken:
        uniform = Candidates(tuple(range(32)), (1 / 32,) * 32)
        verify = service.target._backend.verify
        service.target._backend.verify = lambda jobs: verify(
            [job._replace(candidates=(uniform,) * len(job.candidates)) for job in jobs]
        )
    counts = torch.zeros(model.config.vocab_size)
    num_accepted = 0
    for start in range(0, NUM_DRAWS, 500):
        outputs, stats = run(service, cases[start : start + 500])
        num_accepted += stats.num_accepted_tokens
        for output in outputs:
            counts[output[1]] += 1
    assert is_broken or num_accepted > NUM_DRAWS / 4
    with torch.inference_mode():
        first = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1].softmax(0)
        rows = torch.tensor([[*PROMPT, token] for token in range(model.config.vocab_size)])
        expected = NUM_DRAWS * (first @ model(rows, use_cache=False).logits[:, -1].softmax(1))
    common = expected >= 10
    observed = [*counts[common].tolist(), counts[~common].sum().item()]
    wanted = torch.tensor([*expected[common].tolist(), expected[~common].sum().item()], dtype=torch.float64)
    return float(chisquare(observed, (wanted / wanted.sum() * NUM_DRAWS).tolist()).pvalue)


def test_the_rejection_rule_draws_from_the_target() -> None:
    assert second_token_p_value() > 1e-3


def test_wrong_candidates_would_be_found() -> None:
    assert second_token_p_value(is_broken=True) < 1e-6


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
    others = SamplingParams(temperature=0.0), SamplingParams(acceptance="rejection")
    groups = [RowGroup(Case(PROMPT, 9, s, seed).spec(), [*PROMPT]) for s in (others[0], sampling, others[1])]
    drawn = propose(Sampler(50), logits, groups, count)
    assert [(one.token, one.candidates) for one in drawn] == [
        (one.token, one.candidates) for one in propose(Sampler(50), logits, groups)
    ]
    return drawn[1].token, drawn[1].guesses, logits[1, :50]


@pytest.mark.parametrize("count", [1, 4, 60])
def test_guesses_are_ranked_as_tokens_are_chosen(count: int) -> None:
    for seed in range(5):
        token, guesses, logits = guesses_for(SamplingParams(temperature=0.7), count, seed)
        noised = logits / 0.7 + gumbel([seed], [len(PROMPT)], 50, "cpu")[0]
        assert [token, *guesses] == noised.argsort(descending=True).tolist()[: count + 1]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_with_temperature_zero_guesses_are_the_next_best(acceptance: Acceptance) -> None:
    token, guesses, logits = guesses_for(SamplingParams(temperature=0.0, acceptance=acceptance), 4)
    assert [token, *guesses] == logits.argsort(descending=True).tolist()[:5]


def test_under_the_rejection_rule_guesses_are_the_likeliest_that_were_not_drawn() -> None:
    token, guesses, logits = guesses_for(SamplingParams(acceptance="rejection"), 4)
    assert list(guesses) == [other for other in logits.argsort(descending=True).tolist() if other != token][:4]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_nothing_is_guessed_that_cannot_be_said(acceptance: Acceptance) -> None:
    token, guesses, logits = guesses_for(SamplingParams(top_k=3, acceptance=acceptance), 10)
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


def test_under_the_rejection_rule_likelihoods_are_left_to_the_acceptance_rate() -> None:
    group = RowGroup(Case(PROMPT, 9, SamplingParams(acceptance="rejection")).spec(), [1])
    assert propose(Sampler(50), torch.randn(1, 50), [group], 5)[0].likelihoods == ()
