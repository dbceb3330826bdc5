from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI

from specdec.core.types import TokenLogprobs
from tests.deployments.http.scripted import rounds

from .conftest import TEXT, Bench

STOP = "\n\n\ndef"
SIZES = [1, 2, 3, 7, 100]


def scored(bench: Bench, text: str, size: int) -> None:
    """Say a text with made-up, recognizable log probabilities, whatever way each token came."""
    ids = [*bench.tokenizer.encode(text), 0]
    entries = [
        TokenLogprobs(-0.01 * (i + 1), 1, ((token, -0.01 * (i + 1)), (7, -math.inf))) for i, token in enumerate(ids)
    ]
    bench.script = lambda request: rounds(ids, size, logprobs=entries)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", SIZES)
async def test_edge_02_a_stop_string_mid_run_trims_text_and_logprobs_and_is_billed(
    bench: Bench, client: AsyncOpenAI, size: int, stream: bool
) -> None:
    scored(bench, TEXT, size)
    ids = bench.tokenizer.encode(TEXT)
    count = next(n for n in range(len(ids)) if STOP in bench.tokenizer.decode(ids[:n]))
    before = TEXT[: TEXT.index(STOP)]
    shown = next(n for n in range(len(ids)) if bench.tokenizer.decode(ids[:n]).startswith(before))
    assert shown < count
    options = {"stop": ["never", STOP], "logprobs": 1, "extra_body": {"return_token_ids": True}}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await client.completions.create(model="demo", prompt="x", **options)
    got = [chunk async for chunk in answer] if stream else [answer]
    choices = [chunk.choices[0] for chunk in got if chunk.choices]
    assert "".join(choice.text for choice in choices) == TEXT[: TEXT.index(STOP)]
    assert [token for choice in choices for token in choice.token_ids] == ids[:count]
    lists = [choice.logprobs.token_logprobs for choice in choices if choice.logprobs]
    assert sum(map(len, lists)) == shown
    assert got[-1].usage.completion_tokens == count
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", STOP)
    assert bench.metric("generation_tokens_total") == count
    received = min(math.ceil(count / size) * size, len(ids) + 1)
    assert bench.metric("discarded_tokens_total") == received - count
    assert bool(bench.service.cancelled) == (received < len(ids) + 1)


async def test_edge_02_no_chunk_shows_the_beginning_of_a_stop_string(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("one\ntwo\n\nthree")
    stream = await client.completions.create(model="demo", prompt="x", stop="\n\n", stream=True)
    texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == "one\ntwo"
    assert not any(text.endswith("\n") for text in texts)


async def test_a_stop_token_ends_without_its_text(bench: Bench, client: AsyncOpenAI) -> None:
    ids = bench.tokenizer.encode("one\n")
    bench.script = lambda request: rounds(ids, 2)
    answer = await client.completions.create(model="demo", prompt="x", extra_body={"stop_token_ids": ids[-1:]})
    assert (answer.choices[0].text, answer.choices[0].stop_reason) == ("one", ids[-1])
    assert answer.usage.completion_tokens == len(ids)


@pytest.mark.parametrize("size", SIZES)
async def test_edge_05_logprobs_are_the_targets_for_every_token(bench: Bench, client: AsyncOpenAI, size: int) -> None:
    scored(bench, TEXT, size)
    ids = [*bench.tokenizer.encode(TEXT), 0]
    expected = [-0.01 * (i + 1) for i in range(len(ids))]
    answer = await client.completions.create(model="demo", prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs == expected
    assert not any(value == 0.0 for value in logprobs.token_logprobs)
    assert logprobs.tokens[0] == bench.tokenizer.decode(ids[:1])
    assert all(min(top.values()) == -9999.0 for top in logprobs.top_logprobs)
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert token.startswith(("bytes:", "<|")) or TEXT[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_edge_05_logprobs_of_a_chat_have_bytes(bench: Bench, client: AsyncOpenAI, stream: bool) -> None:
    scored(bench, TEXT, 3)
    messages = [{"role": "user", "content": "x"}]
    answer = await client.chat.completions.create(
        model="demo", messages=messages, logprobs=True, top_logprobs=2, stream=stream
    )
    chunks = [chunk async for chunk in answer] if stream else [answer]
    content = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert bytes(byte for entry in content[:-1] for byte in entry.bytes).decode() == TEXT
    assert [entry.logprob for entry in content] == [-0.01 * (i + 1) for i in range(len(content))]
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert bench.service.opened[0].spec.sampling.logprobs == 2


async def test_without_alternatives_only_the_chosen_are_reported(bench: Bench, client: AsyncOpenAI) -> None:
    scored(bench, "ok", 1)
    answer = await client.completions.create(model="demo", prompt="x", logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs is None
    messages = [{"role": "user", "content": "x"}]
    await client.chat.completions.create(model="demo", messages=messages, logprobs=True)
    assert [request.spec.sampling.logprobs for request in bench.service.opened] == [0, 0]


async def test_logprobs_that_contradict_are_refused(refused: Callable[..., Any]) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    assert (await refused("/v1/chat/completions", chat | {"top_logprobs": 2}))["param"] == "top_logprobs"
    over = chat | {"logprobs": True, "top_logprobs": 21}
    assert (await refused("/v1/chat/completions", over))["param"] == "top_logprobs"
