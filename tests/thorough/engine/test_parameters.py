"""Every sampling parameter through the engine: it acts, exactly, and speculation changes no token of it."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from specdec.core.params import SamplingParams
from specdec.core.tokens import SharedTokens
from specdec.engine.engine import InProcessService
from specdec.sampling.noise import gumbel
from tests.letters import spelled
from tests.sizes import some
from tests.specdec.engine.pairs import (
    EOS,
    TIE,
    Case,
    Output,
    collect,
    greedy,
    make_model,
    make_service,
    run,
)
from tests.specdec.models.families import VOCAB_SIZE
from tests.specdec.sampling.reference import row_probs

DRAFT_LENGTHS = (0, 1, 4, 8)
TEMPERATURES = (0.0, 1.0)
HALF_RIGHT = 0.06
MAX_TOKENS = 20
RAISED_EOS = ((EOS, 100.0),)
CUT = {"top_k": 7, "top_p": 0.7, "min_p": 0.1}
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5}

PARAMETERS: dict[str, dict[str, object]] = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "truncation together": CUT,
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_penalty below 1": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -2.0},
    "penalties together": PENALTIES,
    "logit_bias": {"logit_bias": ((7, 3.0), (9, 2.5), (11, -100.0))},
    "min_tokens": {"min_tokens": 9, "logit_bias": RAISED_EOS},
    "stop_token_ids": {},
    "several eos ids": {},
    "ignore_eos": {"ignore_eos": True, "logit_bias": RAISED_EOS},
    "max_tokens 1": {},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "everything": {
        **CUT,
        **PENALTIES,
        "logit_bias": ((7, 2.0), (EOS, 4.0)),
        "min_tokens": 6,
        "logprobs": 0,
        "allowed_token_ids": SharedTokens(range(1, 60)),
        "bad_words": ((7, 7), (20,), (9, 9, 7)),
    },
    "allowed_token_ids": {"allowed_token_ids": SharedTokens(range(1, VOCAB_SIZE, 3))},
    "bad_words": {},
}
"""Nineteen requests: each of them is also run among the eighteen others."""

WITHOUT_EFFECT_AT_ZERO = {"top_k", "top_p", "min_p", "truncation together"}
SAME_TOKENS = {"logprobs"}


@dataclass(frozen=True)
class Request:
    """A case with a parameter, and what the same prompt and seed give without it."""

    case: Case
    without: list[int]


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def services() -> dict[int, InProcessService]:
    return {k: make_service("llama", HALF_RIGHT, k, chunk=64) for k in DRAFT_LENGTHS}


@pytest.fixture(scope="module")
def requests(services: dict[int, InProcessService]) -> dict[float, dict[str, Request]]:
    """All parameters, by temperature and name."""
    made = {}
    for temperature in TEMPERATURES:
        rng = random.Random(5)
        prompts = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))) for _ in PARAMETERS]
        plain = SamplingParams(temperature=temperature)
        cases = [Case(prompt, MAX_TOKENS, plain, 70 + i) for i, prompt in enumerate(prompts)]
        tokens, _ = run(services[0], cases)
        made[temperature] = {
            name: Request(with_parameter(name, case, without), without)
            for name, case, without in zip(PARAMETERS, cases, tokens, strict=True)
        }
    return made


@pytest.fixture(scope="module")
def plain_outputs(
    services: dict[int, InProcessService], requests: dict[float, dict[str, Request]]
) -> dict[float, dict[str, Output]]:
    """What all give in one batch without drafts."""
    return {t: outputs_of(services[0], requests[t]) for t in TEMPERATURES}


def with_parameter(name: str, case: Case, without: list[int]) -> Case:
    """The case under a parameter; ends are tokens that are known to come."""
    sampling = replace(case.sampling, **PARAMETERS[name])
    match name:
        case "stop_token_ids":
            return replace(case, sampling=replace(sampling, stop_token_ids=(3, without[first_new(without, 4)])))
        case "bad_words":
            words = tuple(tuple(without[i : i + n]) for n, i in ((2, 3), (3, 5), (1, 6)))
            return replace(case, sampling=replace(sampling, bad_words=words))
        case "several eos ids":
            return replace(case, sampling=sampling, eos_token_ids=(EOS, 4, without[first_new(without, 4)]))
        case "max_tokens 1":
            return replace(case, sampling=sampling, max_tokens=1)
    return replace(case, sampling=sampling)


def first_new(tokens: list[int], start: int) -> int:
    """The first place from ``start`` on whose token has not come before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


def outputs_of(service: InProcessService, requests: dict[str, Request]) -> dict[str, Output]:
    outputs = collect(service, [request.case for request in requests.values()])
    return dict(zip(requests, outputs, strict=True))


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
@pytest.mark.parametrize("name", PARAMETERS)
def test_each_token_is_what_the_parameters_make_of_the_models_logits(
    name: str,
    temperature: float,
    stock: PreTrainedModel,
    requests: dict[float, dict[str, Request]],
    plain_outputs: dict[float, dict[str, Output]],
) -> None:
    case, tokens = requests[temperature][name].case, plain_outputs[temperature][name].tokens
    spec, log = case.spec(), [*case.prompt, *tokens]
    with torch.inference_mode():
        logits = stock(torch.tensor([log]), use_cache=False).logits[0].double()
    positions = range(len(case.prompt), len(log))
    noise = gumbel([case.seed] * len(positions), list(positions), VOCAB_SIZE, "cpu").double() * (temperature > 0)
    for i, row in zip(positions, noise, strict=True):
        probs = torch.tensor(row_probs(logits[i - 1].tolist(), spec, log[:i]), dtype=torch.float64)
        scores = probs.log() + row
        assert scores.max() - scores[log[i]] < TIE, f"token {i - len(case.prompt)} is {log[i]}, not {scores.argmax()}"


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_has_its_effect(
    name: str,
    temperature: float,
    requests: dict[float, dict[str, Request]],
    plain_outputs: dict[float, dict[str, Output]],
) -> None:
    request, output = requests[temperature][name], plain_outputs[temperature][name]
    tokens, sampling, without = output.tokens, request.case.sampling, request.without
    is_same = name in SAME_TOKENS or (temperature == 0 and name in WITHOUT_EFFECT_AT_ZERO)
    assert (tokens == without) == is_same
    match name:
        case "logit_bias":
            assert {7, 9} & set(tokens)
            assert 11 not in tokens
        case "allowed_token_ids":
            assert set(tokens) <= set(sampling.allowed_token_ids)
        case "bad_words":
            assert all(tuple(tokens[i : i + len(w)]) != w for w in sampling.bad_words for i in range(MAX_TOKENS))
        case "min_tokens":
            assert (len(tokens), tokens.index(EOS), output.finish) == (10, 9, "stop")
        case "stop_token_ids" | "several eos ids":
            assert output.finish == "stop"
            assert tokens == without[: first_new(without, 4) + 1]
        case "ignore_eos":
            assert (tokens, output.finish) == ([EOS] * MAX_TOKENS, "length")
        case "max_tokens 1":
            assert (tokens, output.finish) == (without[:1], "length")
        case "logprobs":
            assert [len(entry.top) for entry in output.notes.logprobs or ()] == [2] * MAX_TOKENS
            assert len(output.notes.prompt_logprobs or ()) == len(request.case.prompt)
    if sampling.logprobs is None:
        assert output.notes.logprobs is None


def assert_equal(output: Output, plain: Output, name: str) -> None:
    """The same tokens, end, and log probabilities, but for what rounding makes of the latter."""
    assert (output.tokens, output.finish) == (plain.tokens, plain.finish), name
    for got, want in (
        (output.notes.logprobs, plain.notes.logprobs),
        tuple(told and told.unpack() for told in (output.notes.prompt_logprobs, plain.notes.prompt_logprobs)),
    ):
        assert (got is None) == (want is None), name
        for a, b in zip(got or (), want or (), strict=True):
            assert (a is None) == (b is None), name
            if a is not None and b is not None:
                values, wanted = ((e.logprob, *(value for _, value in e.top)) for e in (a, b))
                assert values == pytest.approx(wanted, abs=TIE), name
                assert (a.rank, [i for i, _ in a.top]) == (b.rank, [i for i, _ in b.top]), name


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
@pytest.mark.parametrize("num_draft_tokens", DRAFT_LENGTHS)
def test_all_parameters_in_one_batch_with_drafts(
    num_draft_tokens: int,
    temperature: float,
    services: dict[int, InProcessService],
    requests: dict[float, dict[str, Request]],
    plain_outputs: dict[float, dict[str, Output]],
) -> None:
    outputs = outputs_of(services[num_draft_tokens], requests[temperature])
    for name, plain in plain_outputs[temperature].items():
        assert_equal(outputs[name], plain, name)
    if num_draft_tokens:
        assert all(any(output.notes.num_drafted) for name, output in outputs.items() if name != "max_tokens 1")
        how = "".join(spelled(output.notes) for output in outputs.values())
        assert min(how.count(letter) for letter in "abc") > 5


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_each_parameter_alone_with_drafts(
    num_draft_tokens: int,
    temperature: float,
    services: dict[int, InProcessService],
    requests: dict[float, dict[str, Request]],
    plain_outputs: dict[float, dict[str, Output]],
) -> None:
    for name, plain in plain_outputs[temperature].items():
        (output,) = collect(services[num_draft_tokens], [requests[temperature][name].case])
        assert_equal(output, plain, name)


TRANSFORMERS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
    "repetition_penalty below 1": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "min_tokens": (
        {"min_tokens": 9, "logit_bias": RAISED_EOS},
        {"min_new_tokens": 9, "sequence_bias": {(EOS,): 100.0}},
    ),
    "logit_bias": (
        {"logit_bias": ((7, 1.5), (9, 1.2), (11, -2.0))},
        {"sequence_bias": {(7,): 1.5, (9,): 1.2, (11,): -2.0}},
    ),
    "logit_bias and repetition_penalty": (
        {"logit_bias": ((7, 1.5), (9, 1.2), (11, -2.0), (30, 0.7)), "repetition_penalty": 1.6},
        {"sequence_bias": {(7,): 1.5, (9,): 1.2, (11,): -2.0, (30,): 0.7}, "repetition_penalty": 1.6},
    ),
    "banned tokens": (
        {"logit_bias": tuple((token, -100.0) for token in range(3, 64))},
        {"suppress_tokens": list(range(3, 64))},
    ),
    "bad words": (
        {"bad_words": tuple((token,) for token in range(3, 40))},
        {"bad_words_ids": [[token] for token in range(3, 40)]},
    ),
    "together": (
        {"repetition_penalty": 1.3, "min_tokens": 12, "top_k": 5, "top_p": 0.5},
        {"repetition_penalty": 1.3, "min_new_tokens": 12},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_greedy_with_a_parameter_is_that_of_transformers(
    name: str, stock: PreTrainedModel, services: dict[int, InProcessService]
) -> None:
    ours, theirs = TRANSFORMERS[name]
    rng = random.Random(8)
    prompts = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (3, 30)]
    sampling = SamplingParams(temperature=0.0, **ours)  # type: ignore[arg-type]
    ends = (EOS, 5, *range(64, 80)) if name == "together" else (EOS,)
    cases = [Case(prompt, 24, sampling, eos_token_ids=ends) for prompt in prompts]
    wanted = [greedy(stock, case, **theirs) for case in cases]
    assert wanted != [greedy(stock, case) for case in cases]
    for k in DRAFT_LENGTHS:
        assert run(services[k], cases)[0] == wanted


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
def test_a_chosen_parameter_among_equal_prompts(temperature: float, services: dict[int, InProcessService]) -> None:
    """Rows of one prompt and seed in one batch differ by their own parameters alone."""
    prompt = tuple(range(20, 45))
    samplings = [
        SamplingParams(temperature=temperature, frequency_penalty=penalty, top_k=top_k)
        for penalty in (0.0, 1.0)
        for top_k in (0, 4)
    ]
    cases = [Case(prompt, 16, sampling, 3) for sampling in samplings * 2]
    plain = [run(services[0], [case])[0][0] for case in cases[:4]]
    assert len(set(map(tuple, plain))) == (2 if temperature == 0 else 4)
    for k in DRAFT_LENGTHS:
        assert run(services[k], cases)[0] == plain * 2


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
def test_equal_requests_in_one_batch_give_equal_outputs(
    temperature: float, services: dict[int, InProcessService]
) -> None:
    """The same prompt, seed and penalties, several times at once, and under another length of output."""
    sampling = SamplingParams(temperature=temperature, logprobs=2, **PENALTIES)  # type: ignore[arg-type]
    case = Case(tuple(range(20, 45)), 16, sampling, 3)
    (plain,) = collect(services[0], [case])
    for k in DRAFT_LENGTHS:
        *equal, short = collect(services[k], [case, case, case, replace(case, max_tokens=5)])
        for output in equal:
            assert_equal(output, plain, f"K = {k}")
        assert short.tokens == plain.tokens[:5]
