"""What a client sees of a stream that waits: its headers, comments, tokens or error; and what is refused before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.http.app import create_app
from specdec.core.errors import SequenceFailedError
from tests.waiting import eventually

from .conftest import Bench, limits, listening

COMMENT = ": still here"
PATHS = {
    "completions": {"prompt": "x"},
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
}


@asynccontextmanager
async def served(
    bench: Bench, num_sequences: int = 1, num_waiting: int = 1, **bounds: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """A real server, with places for some sequences and waiting places for some requests."""
    settings = replace(
        bench.settings, limits=limits(num_sequences, num_waiting, **{"stream_headers_after_s": 0.05} | bounds)
    )
    app = create_app(bench.service, settings, bench.tokenizer, bench.observer)
    async with listening(app) as url, httpx2.AsyncClient(base_url=f"{url}/v1", timeout=60) as http:
        yield http


@pytest.fixture
def ask(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], dict[str, Any]]:
    return lambda path: {"model": "demo", "stream": True, **PATHS[path]}


def data_of(lines: list[str]) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("waits", ["for a place", "for a target"])
async def test_a_stream_that_waits_has_headers_and_comments_and_then_its_tokens(
    bench: Bench, ask: Callable[[str], dict[str, Any]], path: str, waits: str
) -> None:
    gate = asyncio.Event()
    bench.script = lambda request: [*([] if waits == "for a place" else [gate]), *bench.say("one")]
    async with served(bench, stream_comment_every_s=0.05) as http, AsyncExitStack() as stack:
        if waits == "for a place":
            bench.script = lambda request: [gate, *bench.say("one")]
            first = asyncio.create_task(http.post("/completions", json={"model": "demo", "prompt": "x"}))
            stack.push_async_callback(lambda: first)
            await eventually(lambda: bench.service.opened)
        stream = await stack.enter_async_context(http.stream("POST", f"/{path}", json=ask(path)))
        assert stream.status_code == 200
        lines = stream.aiter_lines()
        waited = [await anext(lines) for _ in range(4)]
        assert waited == [COMMENT, "", COMMENT, ""]
        gate.set()
        rest = [line async for line in lines]
        assert "one" in json.dumps(data_of(rest))
        assert (rest[-2] == "data: [DONE]") == (path != "responses")


async def test_comments_stand_between_tokens_that_are_far_apart(bench: Bench) -> None:
    gate = asyncio.Event()
    one, *others = bench.say("one two three")
    bench.script = lambda request: [one, gate, *others]
    ask = {"model": "demo", "prompt": "x", "stream": True}
    seen: list[str] = []
    bounds = {"stream_headers_after_s": 60.0, "stream_comment_every_s": 0.05}
    async with served(bench, **bounds) as http, http.stream("POST", "/completions", json=ask) as stream:
        async for line in stream.aiter_lines():
            seen.append(line)
            if seen.count(COMMENT) == 2:
                gate.set()
    first = next(i for i, line in enumerate(seen) if line.startswith("data: {"))
    assert first < seen.index(COMMENT)
    assert all(not seen[i + 1] for i, line in enumerate(seen) if line == COMMENT), "each is a block of its own"
    assert "".join(chunk["choices"][0]["text"] for chunk in data_of(seen)) == "one two three"


@pytest.mark.parametrize("path", PATHS)
async def test_what_fails_after_the_headers_is_an_event(
    bench: Bench, ask: Callable[[str], dict[str, Any]], path: str
) -> None:
    gate = asyncio.Event()
    bench.script = lambda request: [gate, SequenceFailedError("it is broken")]
    async with served(bench) as http, http.stream("POST", f"/{path}", json=ask(path)) as stream:
        lines = stream.aiter_lines()
        assert (stream.status_code, await anext(lines)) == (200, COMMENT)
        gate.set()
        rest = [line async for line in lines]
    events = data_of(rest)
    told = next(event for event in events if event.get("type") == "error" or "error" in event)
    assert "it is broken" in json.dumps(told)
    assert "data: [DONE]" not in rest
    assert path != "responses" or events[-1]["type"] == "response.failed"


async def test_what_can_be_refused_is_refused_before_the_headers(bench: Bench) -> None:
    """Though these would be due at once: a wrong request, one for which there is no place to wait, and no target."""
    gate = asyncio.Event()
    bench.script = lambda request: [gate, *bench.say("one")]
    ask = {"model": "demo", "prompt": "x", "stream": True}
    async with served(bench, 2, stream_headers_after_s=1e-9) as http, asyncio.TaskGroup() as group:
        assert (await http.post("/completions", json=ask | {"temperature": -1})).status_code == 400
        assert (await http.post("/completions", json=ask | {"prompt": [1] * 500})).status_code == 400
        for n, num_waiting in ((2, 2), (1, 3)):  # both places, then the place to wait
            group.create_task(http.post("/completions", json=ask | {"n": n}))
            await eventually(lambda most=num_waiting: bench.metric("num_requests_waiting") >= most)
        refused = await http.post("/completions", json=ask | {"prompt": "y"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        gate.set()


@pytest.mark.parametrize("path", PATHS)
async def test_a_later_request_of_a_better_priority_overtakes_those_that_wait(
    bench: Bench, ask: Callable[[str], dict[str, Any]], path: str
) -> None:
    gate = asyncio.Event()
    bench.script = lambda request: [gate, *bench.say("one")]
    async with served(bench, 1, 2, priorities="own") as http, asyncio.TaskGroup() as group:
        for number, priority in enumerate((0, 7, -7), start=1):
            body = ask(path) | {"stream": False, "priority": priority}
            group.create_task(http.post(f"/{path}", json=body))
            await eventually(lambda most=number: bench.metric("num_requests_waiting") >= most)
        gate.set()
    assert [request.spec.priority for request in bench.service.opened] == [0, -7, 7]


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(bench: Bench) -> None:
    bench.script = lambda request: [asyncio.Event()]
    ask = {"model": "demo", "prompt": "x", "stream": True}
    async with served(bench) as http:
        for _ in range(2):  # the second gets the first one's place
            async with http.stream("POST", "/completions", json=ask) as stream:
                assert await anext(stream.aiter_lines()) == COMMENT
        await eventually(lambda: len(bench.service.cancelled) >= 2)
