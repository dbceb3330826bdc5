"""Streams whose clients take nothing, over the code of Serve's replica that holds what is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from ray.serve._private.replica import UserCallableWrapper

from cluster.config.limits import Limits
from deployments.http import untaken
from deployments.http.service import ApiSettings
from specdec.core.types import TokenLogprobs

from .conftest import Bench
from .scripted import Step, rounds

NUM_TOKENS = 2000


class Pause(asyncio.Event):
    """Lets a script go on in another turn of the loop."""

    async def wait(self) -> Literal[True]:
        await asyncio.sleep(0.001)
        return True


def paused(num_tokens: int, entries: list[TokenLogprobs] | None = None) -> list[Step]:
    return [step for delta in rounds([5] * num_tokens, 1, "length", entries) for step in (Pause(), delta)]


def streamed(bench: Bench, **fields: Any) -> AsyncGenerator[list[dict[str, Any]]]:
    """What the transport takes of a stream, as Serve's replica gives it."""
    body = {"model": "demo", "prompt": "x", "stream": True, "max_tokens": NUM_TOKENS, **fields}
    received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [(b"content-type", b"application/json"), (b"host", b"api")]
    where = {"path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "", "query_string": b""}
    kind = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}

    async def receive() -> dict[str, Any]:
        return received.pop() if received else await asyncio.Event().wait()

    async def call(_info: Any, scope: Any, receive: Any, send: Any) -> None:
        await bench.app(scope, receive, send)

    replica = SimpleNamespace(
        get_user_method_info=lambda _: None, _run_user_code_in_separate_thread=False, _call_http_entrypoint=call
    )
    request = SimpleNamespace(call_method="__call__")
    scope = {**kind, **where, "headers": headers, "client": ("127.0.0.1", 1), "server": ("api", 80)}
    return UserCallableWrapper.call_http_entrypoint(replica, request, lambda _: None, scope, receive)


def text_of(messages: list[dict[str, Any]]) -> str:
    return b"".join(message.get("body", b"") for message in messages).decode()


def make_bench(tokenizer: Any, timeout_s: float) -> Bench:
    settings = ApiSettings(limits=Limits(slow_client_timeout_s=timeout_s))
    made = Bench(tokenizer, settings, max_model_len=1 << 16)
    made.script = lambda request: paused(NUM_TOKENS)
    return made


@pytest.fixture
def bench(tokenizer: Any) -> Bench:
    """Patient: what a stream's client takes is in time on any machine."""
    return make_bench(tokenizer, 60)


def generated(bench: Bench) -> tuple[float, float]:
    return bench.metric("generation_tokens_total"), bench.metric("discarded_tokens_total")


async def ended(bench: Bench) -> None:
    async with asyncio.timeout(60):
        while bench.metric("num_requests_running"):
            await asyncio.sleep(0.02)


async def test_a_client_that_takes_its_stream_gets_and_pays_for_all(bench: Bench) -> None:
    text = "".join([text_of(messages) async for messages in streamed(bench)])
    assert text.endswith("data: [DONE]\n\n")
    await ended(bench)
    assert generated(bench) == (NUM_TOKENS, 0)


async def test_a_stream_of_which_more_than_1_mib_is_not_taken_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(untaken, "MAX_UNTAKEN_BYTES", 1 << 14)
    monkeypatch.setattr(untaken, "_MOST_TIME_S", 0.0)
    entries = [TokenLogprobs(-1.0, 1, tuple((token, -1.0) for token in range(20)))] * NUM_TOKENS
    bench.script = lambda request: paused(NUM_TOKENS, entries)
    stream = streamed(bench, logprobs=20)
    first = await anext(stream)
    await ended(bench)
    num_delivered, num_discarded = generated(bench)
    assert num_delivered <= text_of(first).count("data: ")
    assert 0 < num_discarded < 100, "it has not run to its end"
    assert len(bench.service.cancelled) == 1
    rest = [messages async for messages in stream]
    assert rest == [], "what was not taken is dropped"
    assert "at most" in caplog.text


async def test_a_message_that_is_larger_than_that_is_given_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaken, "MAX_UNTAKEN_BYTES", 1 << 8)
    monkeypatch.setattr(untaken, "_MOST_TIME_S", 60.0)
    entries = [TokenLogprobs(-1.0, 1, tuple((token, -1.0) for token in range(20)))] * 32
    bench.script = lambda request: paused(32, entries)
    text = "".join([text_of(messages) async for messages in streamed(bench, logprobs=20, max_tokens=32)])
    assert max(map(len, text.split("\n\n"))) > 1 << 8
    assert text.endswith("data: [DONE]\n\n")


async def test_a_stream_of_which_nothing_is_taken_for_too_long_ends(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(tokenizer, 0.2)
    bench.script = lambda request: paused(8)
    stream = streamed(bench)
    first = await anext(stream)
    await ended(bench)
    async with asyncio.timeout(60):
        while "limits.slow_client_timeout_s" not in caplog.text:
            await asyncio.sleep(0.02)
    num_delivered, num_discarded = generated(bench)
    assert num_delivered <= text_of(first).count("data: ")
    assert num_discarded <= 8 - num_delivered
    assert [messages async for messages in stream] == []


async def test_what_is_taken_late_but_in_time_is_paid_for(bench: Bench) -> None:
    bench.script = lambda request: paused(8)
    stream = streamed(bench)
    texts = [text_of(await anext(stream))]
    await asyncio.sleep(0.1)
    num_before = generated(bench)[0]
    texts += [text_of(messages) async for messages in stream]
    assert "".join(texts).endswith("data: [DONE]\n\n")
    assert num_before < 8
    assert generated(bench) == (8, 0)
