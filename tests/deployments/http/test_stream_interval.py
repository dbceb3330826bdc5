"""Events of a stream that hold several tokens."""

from __future__ import annotations

import pytest
from openai import APIError, AsyncOpenAI
from transformers import PreTrainedTokenizerFast

from deployments.http.service import ApiSettings
from tests.deployments.http.scripted import rounds

from .conftest import TEXT, Bench


@pytest.fixture
def bench(tokenizer: PreTrainedTokenizerFast, interval: int) -> Bench:
    return Bench(tokenizer, ApiSettings(stream_interval=interval))


@pytest.mark.parametrize("interval", [1, 4, 1000])
async def test_an_event_holds_as_many_tokens_as_is_said(bench: Bench, client: AsyncOpenAI, interval: int) -> None:
    bench.says(TEXT, 1)
    options = {"model": "demo", "prompt": "x", "n": 2, "extra_body": {"return_token_ids": True}}
    got = [chunk async for chunk in await client.completions.create(stream=True, **options)]
    for index in range(2):
        choices = [chunk.choices[0] for chunk in got if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in choices) == TEXT
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        opening, first, *middle, last = (len(choice.token_ids) for choice in choices)
        assert (opening, first) == (0, 1)
        assert middle == [interval] * len(middle)
        assert last <= interval


@pytest.mark.parametrize("interval", [100])
async def test_what_was_held_back_goes_out_before_an_error(bench: Bench, client: AsyncOpenAI) -> None:
    text = "def add(a, b)"
    steps = [delta for delta in rounds(bench.tokenizer.encode(text)) if delta.finish is None]
    bench.script = lambda request: [*steps, RuntimeError("lost")]
    texts = []

    async def read() -> None:
        async for chunk in await client.completions.create(model="demo", prompt="x", stream=True):
            texts.append(chunk.choices[0].text)

    with pytest.raises(APIError):
        await read()
    assert "".join(texts) == bench.tokenizer.decode(bench.tokenizer.encode(text)[:-1])
