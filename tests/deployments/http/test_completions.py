from __future__ import annotations

import asyncio
from typing import Any

import anyio.to_thread
import httpx2
import pytest
from openai import AsyncOpenAI, InternalServerError

from specdec.core.errors import ServiceUnavailableError
from specdec.sampling.noise import derive_seed

from .conftest import TEXT, Bench


async def ask(client: AsyncOpenAI, **options: Any) -> Any:
    return await client.completions.create(**{"model": "demo", "prompt": "x"} | options)


async def chunks(client: AsyncOpenAI, **options: Any) -> list[Any]:
    return [chunk async for chunk in await ask(client, stream=True, **options)]


async def test_a_completion(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says(TEXT, 3)
    answer = await ask(client, prompt="def f():")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "demo"
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    num_prompt = len(bench.tokenizer.encode("def f():"))
    num_output = len(bench.tokenizer.encode(TEXT)) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_output)
    assert answer.usage.total_tokens == num_prompt + num_output


async def test_a_short_request_is_handed_to_no_other_thread(
    bench: Bench, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where cores are busy, each hand-over waits for one."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("handed to another thread")

    monkeypatch.setattr(anyio.to_thread, "run_sync", refuse)
    monkeypatch.setattr(asyncio, "to_thread", refuse)
    bench.says(TEXT)
    for stream in (False, True):
        answer = await http.post("/v1/completions", json={"model": "demo", "prompt": "x", "stream": stream})
        assert answer.status_code == 200
        assert TEXT[:2] in answer.text


@pytest.mark.parametrize("size", [1, 3, 50])
async def test_a_stream_is_the_same_text_and_whole_characters(bench: Bench, client: AsyncOpenAI, size: int) -> None:
    bench.says(TEXT, size)
    got = await chunks(client)
    texts = [chunk.choices[0].text for chunk in got]
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)
    assert [chunk.choices[0].finish_reason for chunk in got] == [None] * (len(got) - 1) + ["stop"]
    assert len({chunk.id for chunk in got}) == 1
    assert all(chunk.usage is None for chunk in got)


async def test_a_stream_ends_with_its_usage_when_asked(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says(TEXT, 4)
    got = await chunks(client, stream_options={"include_usage": True})
    whole = await ask(client)
    assert all(chunk.usage is None for chunk in got[:-1])
    assert got[-1].choices == []
    assert got[-1].usage == whole.usage


@pytest.mark.parametrize(
    "prompt",
    ["ab", ["ab"], [5, 6], [[5, 6]], ["ab", "cd"], [[5, 6], [7]]],
    ids=["s", "[s]", "[i]", "[[i]]", "2s", "2i"],
)
async def test_prompts_in_every_form(bench: Bench, client: AsyncOpenAI, prompt: Any) -> None:
    bench.says("ok")
    answer = await ask(client, prompt=prompt)
    several = prompt if isinstance(prompt[0], (str, list)) and not isinstance(prompt, str) else [prompt]
    expected = [tuple(bench.tokenizer.encode(one)) if isinstance(one, str) else tuple(one) for one in several]
    assert [tuple(request.prompt) for request in bench.service.opened] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.prompt_tokens == sum(map(len, expected))


async def test_choices_of_several_prompts_and_samples(bench: Bench, client: AsyncOpenAI) -> None:
    bench.script = lambda request: bench.say(f"{request.seq.rpartition('-')[2]} of {len(request.prompt)}")
    answer = await ask(client, prompt=[[5], [6, 7]], n=3, seed=11)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "0 of 1"),
        (1, "1 of 1"),
        (2, "2 of 1"),
        (3, "3 of 2"),
        (4, "4 of 2"),
        (5, "5 of 2"),
    ]
    assert answer.usage.prompt_tokens == 3
    seeds = [request.spec.seed for request in bench.service.opened]
    assert seeds == [derive_seed(11, i, j) for i in range(2) for j in range(3)]
    assert len({request.seq for request in bench.service.opened}) == 6


async def test_seeds_are_drawn_and_differ_where_none_is_given(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    for seed in (None, None, -1, 2**64 - 1):
        await ask(client, seed=seed)
    drawn, other, negative, unsigned = (request.spec.seed for request in bench.service.opened)
    assert drawn != other
    assert negative == unsigned == derive_seed(2**64 - 1, 0, 0)


async def test_echo_begins_with_the_prompt_in_both_forms(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    ids = bench.tokenizer.encode("a 🙂")
    answer = await ask(client, prompt=[ids, ids[:1]], echo=True)
    assert [choice.text for choice in answer.choices] == ["a 🙂ok", "aok"]
    got = await chunks(client, prompt="b ", echo=True)
    assert "".join(chunk.choices[0].text for chunk in got) == "b ok"


async def test_token_ids_come_when_asked(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says(TEXT, 3)
    ids = [*bench.tokenizer.encode(TEXT), 0]
    answer = await ask(client, prompt=[9, 8], extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == ids
    assert answer.choices[0].prompt_token_ids == [9, 8]
    got = await chunks(client, prompt=[9, 8], extra_body={"return_token_ids": True})
    assert got[0].choices[0].prompt_token_ids == [9, 8]
    assert [token for chunk in got for token in chunk.choices[0].token_ids] == ids
    assert not hasattr((await ask(client)).choices[0], "token_ids")


@pytest.mark.parametrize(("detail", "histograms"), [("summary", False), ("detailed", True)])
async def test_speculation_metrics_come_when_asked(
    bench: Bench, client: AsyncOpenAI, detail: str, histograms: bool
) -> None:
    bench.says("a b c d e f g", 3)
    num_tokens = len(bench.tokenizer.encode("a b c d e f g")) + 1
    asked = {"extra_body": {"per_request_spec_decode_metrics": detail, "num_speculative_tokens": 2}}
    metrics = (await ask(client, **asked)).metrics["speculative_decoding"]
    full, rest = divmod(num_tokens, 3)
    assert (full, rest) == (2, 2)
    assert metrics["num_spec_steps"] == 3
    assert metrics["num_draft_tokens"] == metrics["num_accepted_draft_tokens"] == 5
    assert metrics["draft_acceptance_rate"] == 1
    assert metrics["mean_acceptance_length"] == 1 + 5 / 3
    assert metrics["num_spec_tokens"] == 2
    assert ("acceptance_histogram" in metrics) == histograms
    if histograms:
        assert metrics["acceptance_histogram"] == [0, 1, 2]
        assert metrics["acceptance_histogram_by_draft_length"] == {"1": [0, 1], "2": [0, 0, 2]}
    got = await chunks(client, **asked)
    assert got[-1].metrics["speculative_decoding"] == metrics
    assert all(not hasattr(chunk, "metrics") for chunk in got[:-1])
    assert (await ask(client, n=2, **asked)).metrics == {"speculative_decoding": None}


async def test_the_service_refuses_before_a_stream_begins(bench: Bench, client: AsyncOpenAI) -> None:
    bench.script = lambda request: [ServiceUnavailableError("no target is ready")]
    for stream in (False, True):
        with pytest.raises(InternalServerError, match="no target is ready") as caught:
            await ask(client, stream=stream, n=2)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
