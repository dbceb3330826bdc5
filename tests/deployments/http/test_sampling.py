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
    assert spec.keeps_numeric


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
        num_speculative_tokens=0,
        priority=-3,
        exactness="fast",
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
    assert (spec.max_tokens, spec.num_speculative_tokens, spec.priority) == (9, 0, -3)
    assert not spec.keeps_numeric


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
    error = await refused("/v1/completions", BASE | both)
    assert error["param"] == "disable_spec_decode"
    assert "num_speculative_tokens" in error["message"]
    error = await refused("/v1/completions", BASE | {"num_speculative_tokens": -1})
    assert error["param"] == "num_speculative_tokens"


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
