from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers

from deployments.http.middleware import TrackRequests
from deployments.http.observer import Observer
from deployments.http.service import ApiSettings

from .conftest import MAX_MODEL_LEN, TEXT, Bench

ASK = [{"role": "user", "content": "Add."}]


async def ask(client: AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(**{"model": "demo", "messages": ASK} | options)


def prompt_of(bench: Bench, index: int = -1) -> str:
    return bench.tokenizer.decode(list(bench.service.opened[index].prompt))


async def test_an_answer(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says(TEXT, 3)
    answer = await ask(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert prompt_of(bench) == "<|endoftext|># Add.\n"
    assert answer.usage.prompt_tokens == len(bench.service.opened[0].prompt)


async def test_a_stream_begins_with_the_role(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says(TEXT, 3)
    got = [chunk async for chunk in await ask(client, stream=True, n=2, stream_options={"include_usage": True})]
    first, rest, last = got[:2], got[2:-1], got[-1]
    assert [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in first] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    for index in range(2):
        deltas = [chunk.choices[0] for chunk in rest if chunk.choices[0].index == index]
        assert "".join(delta.delta.content or "" for delta in deltas) == TEXT
        assert deltas[-1].finish_reason == "stop"
    assert last.usage.completion_tokens == 2 * (len(bench.tokenizer.encode(TEXT)) + 1)


async def test_without_a_limit_the_rest_of_the_context_is_the_limit(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    await ask(client)
    spec = bench.service.opened[0].spec
    assert spec.max_tokens == MAX_MODEL_LEN - spec.output_start


async def test_both_names_of_the_limit(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    for options in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        await ask(client, **options)
        assert bench.service.opened[-1].spec.max_tokens == 5


async def test_content_in_parts_and_every_role(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "x = 1", "refusal": None},
    ]
    await ask(client, messages=turns)
    assert prompt_of(bench) == "<|endoftext|># Be brief.\n# One.\n# Two.\nx = 1\n\n\n"


async def test_a_turn_that_was_refused(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    for fields, said in (
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "", "refusal": "No."}, "No."),
        ({"content": "Sum.", "refusal": "No."}, "Sum.\nNo."),
        ({"content": [{"type": "text", "text": "Sum."}, {"type": "refusal", "refusal": "No."}]}, "Sum.\nNo."),
        ({"content": [{"type": "text", "text": "Sum."}], "refusal": ""}, "Sum."),
    ):
        turns: list[Any] = [{"role": "user", "content": "Add."}, {"role": "assistant"} | fields]
        await ask(client, messages=turns, extra_body={"chat_template": "{{ messages[1].content }}"})
        assert prompt_of(bench) == said


async def test_a_template_of_the_request(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    template = {"chat_template": "{{ mood }}: {{ messages[0].content }}", "chat_template_kwargs": {"mood": "calm"}}
    await ask(client, extra_body=template)
    assert prompt_of(bench) == "calm: Add."


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "parallel_tool_calls": True, "stream_options": None, "cache_salt": "s"},
        {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"n": None, "seed": None, "stop": None, "temperature": None, "logit_bias": None, "logprobs": None},
    ],
)
async def test_what_changes_nothing_is_taken(bench: Bench, client: AsyncOpenAI, extra: dict[str, Any]) -> None:
    bench.says("ok")
    answer = await ask(client, extra_body=extra)
    assert answer.choices[0].message.content == "ok"


async def test_prefixes_are_shared_only_within_a_key_and_a_salt(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    for key, salt in (("a", None), ("a", None), ("b", None), ("a", "s"), ("b", "s"), ("a", "t")):
        await ask(client.with_options(api_key=key), extra_body={"cache_salt": salt})
    salts = [request.spec.cache_salt for request in bench.service.opened]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 5
    assert not any("Bearer" in salt for salt in salts)


@pytest.mark.parametrize(
    ("share", "first", "second", "are_shared"),
    [
        ("key", ("", "Bearer k"), ("", "bearer  k "), True),
        ("key", ("", "Bearer k"), ("", "Basic k"), False),
        ("key", ("team/a", "Bearer k"), ("team/b", "Bearer l"), False),
        ("group", ("team/a", "Bearer k"), ("team/b", "Bearer l"), True),
        ("group", ("team/a", "Bearer k"), ("other/a", "Bearer l"), False),
        ("group", ("team", "Bearer k"), ("team/a", "Bearer l"), False),
        ("group", ("a", "Bearer k"), ("b", "Bearer l"), False),
        ("all", ("a", "Bearer k"), ("", ""), True),
    ],
)
def test_prefixes_are_shared_as_the_operator_says(
    share: Any, first: tuple[str, str], second: tuple[str, str], are_shared: bool
) -> None:
    settings = ApiSettings(share_prefixes=share)
    middleware = TrackRequests(None, settings, Observer(CollectorRegistry()))  # type: ignore[arg-type]

    def salt(name: str, authorization: str, wanted: str | None = None) -> str | None:
        context = middleware._context(Headers({"authorization": authorization}), "")
        context.stats.key = name
        return context.cache_salt(wanted)

    assert (salt(*first) == salt(*second)) == are_shared
    assert (salt(*first, "s") == salt(*second, "s")) == are_shared
    assert salt(*first, "s") not in (salt(*first), salt(*first, "t")), "salts keep apart in any case"
