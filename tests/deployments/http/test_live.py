"""Over a real server: streams as they come, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from deployments.http.service import SequenceRequest
from specdec.core.errors import ServiceUnavailableError
from specdec.protocol.ingress import TokenDelta
from tests.deployments.http.scripted import Step
from tests.waiting import eventually

from .conftest import MAX_MODEL_LEN, Bench

ASK = {"model": "demo", "prompt": "x"}


async def test_chunks_arrive_as_the_tokens_do(bench: Bench, live: AsyncOpenAI) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    parts = ["a = 1\n", "b = 2\n", "c = 3\n"]

    def script(request: SequenceRequest) -> list[Step]:
        steps: list[Step] = [TokenDelta()]
        for gate, part in zip(gates, parts, strict=True):
            steps += [gate, *map(_unfinished, bench.say(part, 9, "length"))]
        return [*steps, TokenDelta(finish="length")]

    bench.script = script
    stream = await live.completions.create(**ASK, stream=True)
    chunks = aiter(stream)
    for gate, part in zip(gates, parts, strict=True):
        gate.set()
        assert (await anext(chunks)).choices[0].text == part
    assert (await anext(chunks)).choices[0].finish_reason == "length"


async def test_choices_are_interleaved(bench: Bench, live: AsyncOpenAI) -> None:
    turns = [asyncio.Event() for _ in range(4)]

    def script(request: SequenceRequest) -> list[Step]:
        first = request.seq.endswith("-0")
        own = turns[::2] if first else turns[1::2]
        a, b = bench.say("one", 9, "length"), bench.say("two", 9, "length")
        return [TokenDelta(), own[0], _unfinished(a[0]), own[1], *b]

    bench.script = script
    stream = aiter(await live.completions.create(**ASK, n=2, stream=True))
    seen = []
    for turn in turns:
        turn.set()
        choice = (await anext(stream)).choices[0]
        seen.append((choice.index, choice.text))
    assert seen == [(0, "one"), (1, "one"), (0, "two"), (1, "two")]


@pytest.mark.parametrize("admitted", [True, False], ids=["admitted", "waiting"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_edge_17_a_client_that_goes_away_cancels_everything(
    bench: Bench, url: str, path: str, stream: bool, admitted: bool
) -> None:
    never = asyncio.Event()
    said = [_unfinished(step) for step in bench.say("one two")]
    bench.script = lambda request: [*(said if admitted else []), never]
    prompt, count = {
        "/v1/completions": ({"prompt": "x", "n": 3}, 3),
        "/v1/chat/completions": ({"messages": [{"role": "user", "content": "x"}], "n": 3}, 3),
        "/v1/responses": ({"input": "x"}, 1),
    }[path]
    async with httpx2.AsyncClient(base_url=url) as http:
        sending = asyncio.create_task(_read(http, path, {"model": "demo", "stream": stream, **prompt}))
        state = "num_requests_running" if admitted else "num_requests_waiting"
        await eventually(lambda: bench.metric(state) == count)
        assert not bench.service.cancelled
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    await eventually(lambda: len(bench.service.cancelled) == count)
    await eventually(lambda: bench.metric("request_success_total", finished_reason="abort") == count)
    assert bench.metric("num_requests_running") == bench.metric("num_requests_waiting") == 0


async def test_edge_17_a_stop_string_cancels_what_is_still_generated(bench: Bench, live: AsyncOpenAI) -> None:
    never = asyncio.Event()
    said = [_unfinished(step) for step in bench.say("one\n\ntwo")]
    bench.script = lambda request: [*said, never]
    answer = await live.completions.create(**ASK, stop="\n\n", n=2)
    assert [choice.text for choice in answer.choices] == ["one", "one"]
    assert len(bench.service.cancelled) == 2


async def test_one_refused_sequence_cancels_the_others(bench: Bench, live: AsyncOpenAI) -> None:
    never = asyncio.Event()
    bench.script = lambda request: (
        [ServiceUnavailableError("full")] if request.seq.endswith("-1") else [TokenDelta(), never]
    )
    with pytest.raises(openai.InternalServerError, match="full"):
        await live.completions.create(**ASK, n=3, stream=True)
    assert len(bench.service.cancelled) == 2


async def test_many_streams_at_once_do_not_mix(bench: Bench, live: AsyncOpenAI) -> None:
    bench.script = lambda request: bench.say(f"token {request.prompt.tokens[0]} again and again", 2)

    async def one(token: int) -> str:
        stream = await live.completions.create(model="demo", prompt=[token], stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*(one(token) for token in range(100, 140)))
    assert texts == [f"token {token} again and again" for token in range(100, 140)]


async def _spaces(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes >> 16):
        yield b" " * (1 << 16)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_client_that_sends_too_much_is_told_so(url: str, declared: bool) -> None:
    content = b" " * (6 << 20) if declared else _spaces(6 << 20)
    async with httpx2.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["code"] == "request_too_large"
    assert f"over {(1 << 20) + 8 * MAX_MODEL_LEN} bytes" in error["message"]


async def test_a_client_that_never_stops_sending_is_cut_off(url: str) -> None:
    """After the limit of a MiB and what the sockets hold; whether it reads the answer before the reset is chance."""
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        async for part in _spaces(1 << 40):
            num_sent += len(part)
            assert num_sent < 64 << 20, "nobody cuts the client off"
            yield part

    async with httpx2.AsyncClient(base_url=url) as http:
        try:
            answer = await http.post("/v1/completions", content=endless(), headers={"content-type": "application/json"})
        except httpx2.TransportError:
            answer = None
    assert num_sent > 1 << 20
    assert answer is None or answer.status_code == 413


async def test_the_stream_is_server_sent_events(bench: Bench, url: str) -> None:
    bench.says("ok 🙂")
    async with httpx2.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/completions", json=ASK | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])


def _unfinished(delta: Any) -> TokenDelta:
    return TokenDelta(delta.tokens, delta.notes)


async def _read(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> None:
    async with http.stream("POST", path, json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass
