from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from specdec.core.params import GenerationDefaults, SamplingParams

from .conftest import MAX_MODEL_LEN, Bench

BASE = {"model": "demo", "prompt": [5, 6]}
MESSAGES = [{"role": "user", "content": "x"}]


async def sampled(bench: Bench, http: httpx2.AsyncClient, **options: Any) -> Any:
    """The spec that a completion request with these fields leads to."""
    bench.says("ok")
    answer = await http.post("/v1/completions", json=BASE | options)
    assert answer.status_code == 200, answer.text
    return bench.service.opened[-1].spec


def client_of(bench: Bench) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api")


async def test_defaults_are_the_models_else_openais(bench: Bench, http: httpx2.AsyncClient) -> None:
    spec = await sampled(bench, http)
    assert spec.sampling == SamplingParams(top_p=0.9, repetition_penalty=1.1)
    assert (spec.output_start, spec.max_tokens, spec.eos_token_ids) == (2, 16, (0,))
    assert spec.num_speculative_tokens is None


async def test_a_chats_limit_is_the_models_and_shrinks_to_what_is_left(tokenizer: PreTrainedTokenizerFast) -> None:
    bench = Bench(tokenizer, defaults=GenerationDefaults(max_tokens=70))

    async def limit(text: str, **options: Any) -> tuple[int, int]:
        bench.says("ok")
        body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
        async with client_of(bench) as http:
            assert (await http.post("/v1/chat/completions", json=body | options)).status_code == 200
        spec = bench.service.opened[-1].spec
        return spec.output_start, spec.max_tokens

    assert (await limit("x"))[1] == 70
    num_prompt_tokens, left = await limit("x " * 60)
    assert left == MAX_MODEL_LEN - num_prompt_tokens < 70
    assert (await limit("x", max_tokens=75))[1] == 75


async def test_every_parameter_reaches_the_sequence(bench: Bench, http: httpx2.AsyncClient) -> None:
    spec = await sampled(
        bench,
        http,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.25,
        logit_bias={"3": -100, "70": 1.5},
        min_tokens=2,
        max_tokens=9,
        stop_token_ids=[8, 9],
        ignore_eos=True,
        logprobs=4,
        acceptance="coupled",
        num_speculative_tokens=0,
    )
    assert spec.sampling == SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.25,
        logit_bias=((3, -100.0), (70, 1.5)),
        min_tokens=2,
        temperature=0.0,
        top_k=7,
        top_p=0.5,
        min_p=0.1,
        stop_token_ids=(8, 9),
        ignore_eos=True,
        logprobs=4,
    )
    assert (spec.max_tokens, spec.num_speculative_tokens) == (9, 0)


@pytest.fixture
def with_rejection(tokenizer: PreTrainedTokenizerFast) -> Bench:
    return Bench(tokenizer, acceptance="rejection", acceptance_rules=("coupled", "rejection"))


@pytest.mark.parametrize("asked", [None, "coupled", "rejection"])
async def test_the_services_rule_holds_where_a_request_names_none(with_rejection: Bench, asked: str | None) -> None:
    async with client_of(with_rejection) as http:
        spec = await sampled(with_rejection, http, acceptance=asked)
    assert spec.sampling.acceptance == (asked or "rejection")


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"disable_spec_decode": True}, 0),
        ({"disable_spec_decode": True, "num_speculative_tokens": 0}, 0),
        ({"disable_spec_decode": False}, None),
        ({"disable_spec_decode": False, "num_speculative_tokens": 3}, 3),
    ],
)
async def test_disable_spec_decode_is_a_bound_of_0(
    bench: Bench, http: httpx2.AsyncClient, options: dict[str, Any], bound: int | None
) -> None:
    assert (await sampled(bench, http, **options)).num_speculative_tokens == bound


async def test_drafts_cannot_be_both_asked_for_and_switched_off(refused: Callable[..., Any]) -> None:
    both = {"disable_spec_decode": True, "num_speculative_tokens": 2}
    for model in ("demo", "demo-draft"):
        error = await refused("/v1/completions", BASE | both | {"model": model})
        assert error["param"] == "disable_spec_decode"
        assert "num_speculative_tokens" in error["message"]
    error = await refused("/v1/completions", BASE | {"model": "demo-draft", "num_speculative_tokens": -1})
    assert error["param"] == "num_speculative_tokens"


async def test_a_bias_of_a_token_that_is_not_there_says_so(refused: Callable[..., Any]) -> None:
    message = (await refused("/v1/completions", BASE | {"logit_bias": {"4096": 1}}))["message"]
    assert message == "logit_bias must be biases of token ids from 0 to 4095, not 4096"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("logit_bias", {"4096": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("stop_token_ids", [4096]),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**80),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("n", 0),
        ("n", 129),
        ("seed", 2**64),
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", 65),
        ("acceptance", "rejection"),
        ("acceptance", "maybe"),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 1025]),
        ("cache_salt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [4096]),
        ("prompt", [-1]),
        ("prompt", ["a", 1]),
        ("prompt", [1.0]),
        ("prompt", None),
        ("prompt", {"a": 1}),
    ],
)
async def test_a_value_out_of_range_is_refused_by_name(refused: Callable[..., Any], field: str, value: Any) -> None:
    error = await refused("/v1/completions", BASE | {field: value})
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    others = {("acceptance", "rejection"): "unsupported_parameter", ("max_tokens", 2**80): "context_length_exceeded"}
    code = "invalid_value" if isinstance(value, (list, dict)) else others.get((field, value), "invalid_value")
    assert error["code"] == code


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", 1.5),
        ("max_tokens", "16"),
        ("max_tokens", 16.0),
        ("n", True),
        ("seed", "7"),
        ("echo", 1),
        ("stream", "true"),
        ("ignore_eos", 0),
        ("disable_spec_decode", 1),
        ("logprobs", True),
        ("prompt_logprobs", True),
        ("prompt_logprobs", "2"),
        ("model", 3),
    ],
)
async def test_types_are_strict(refused: Callable[..., Any], field: str, value: Any) -> None:
    assert (await refused("/v1/completions", BASE | {field: value}))["param"] == field


async def test_edge_04_prompt_and_output_must_fit_the_models_length(
    bench: Bench, http: httpx2.AsyncClient, refused: Callable[..., Any]
) -> None:
    body = {"model": "demo", "prompt": [5] * 100}
    assert (await sampled(bench, http, prompt=[5] * 100, max_tokens=28)).max_tokens == 28
    error = await refused("/v1/completions", body | {"max_tokens": 29})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("100", "29", str(MAX_MODEL_LEN)))
    error = await refused("/v1/completions", {"model": "demo", "prompt": [5] * MAX_MODEL_LEN})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    long = [{"role": "user", "content": "word " * 200}]
    error = await refused("/v1/chat/completions", {"model": "demo", "messages": long})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert len(bench.service.opened) == 1


async def test_edge_04_a_default_limit_shrinks_to_what_is_left(bench: Bench, http: httpx2.AsyncClient) -> None:
    assert (await sampled(bench, http, prompt=[5] * (MAX_MODEL_LEN - 3))).max_tokens == 3


async def test_edge_04_min_tokens_must_fit_into_max_tokens(refused: Callable[..., Any]) -> None:
    error = await refused("/v1/completions", BASE | {"min_tokens": 5, "max_tokens": 4})
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": "demo", "prompt": "x", "stream_options": {}}, "stream_options"),
        ("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "stream_options": {}}, "stream_options"),
        (
            "/v1/completions",
            {"model": "demo-draft", "prompt": "x", "num_speculative_tokens": 3},
            "num_speculative_tokens",
        ),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
async def test_what_would_be_ignored_is_refused(
    refused: Callable[..., Any], path: str, body: dict[str, Any], param: str
) -> None:
    assert (await refused(path, body))["param"] == param
