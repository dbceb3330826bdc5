"""What an ingress refuses, and how it says so: keys, limits, deadlines, over a real server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from cluster.config.limits import Limits
from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.service import ApiSettings, SequenceRequest
from specdec.core.errors import SequenceFailedError, ServiceUnavailableError
from specdec.protocol.ingress import TokenDelta
from tests.deployments.http.scripted import Step
from tests.waiting import eventually

from .conftest import MAX_MODEL_LEN, Bench, limits, listening

ASK = {"model": "demo", "prompt": "x"}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}


@asynccontextmanager
async def served(
    bench: Bench, keys: dict[str, str] | None = None, bounds: Limits | None = None, **choices: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """The API with some keys of its limits, or with limits as a whole, and with other settings."""
    of_limits = {name: choices.pop(name) for name in Limits.model_fields if name in choices}
    settings = ApiSettings(limits=bounds or limits(**of_limits), **choices)
    app = create_app(bench.service, settings, bench.tokenizer, bench.observer, ApiKeys(keys or {}))
    async with listening(app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
        yield http


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    return error


def never(bench: Bench, text: str = "") -> list[Step]:
    """Says a text, and nothing more for ever."""
    return [*(TokenDelta(step.tokens, step.notes) for step in bench.say(text, 9, "length")), asyncio.Event()]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer wrong", "Basic sk-alice-0123456789", "sk-alice-0123456789"]
)
async def test_without_a_right_key_nothing_is_read(
    bench: Bench, authorization: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(bench, KEYS) as http:
        headers = {"Authorization": authorization} if authorization else {}
        for answer in (
            await http.post("/v1/completions", json=ASK | {"prompt": "x" * (1 << 20)}, headers=headers),
            await http.get("/v1/models", headers=headers),
        ):
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await http.get("/health", headers=headers)).status_code == 200
    assert not bench.service.opened
    assert "sk-alice" not in caplog.text


async def test_a_right_key_is_known_by_its_name(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.says("ok")
    caplog.set_level(logging.INFO, "ray.serve")
    async with served(bench, KEYS) as http:
        async with AsyncOpenAI(api_key=KEYS["bob"], base_url=f"{http.base_url}/v1", max_retries=0) as client:
            await client.completions.create(**ASK)
        async with AsyncOpenAI(api_key="wrong", base_url=f"{http.base_url}/v1", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
    assert "key=bob" in caplog.text
    assert "sk-bob" not in caplog.text


EXPOSED = {"x-request-id", "retry-after", "x-should-retry", "x-specdec-warning"}


async def test_pages_of_allowed_origins_may_call(bench: Bench) -> None:
    bench.says("ok")
    ours, other = "https://ours.example", "https://other.example"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    async with served(bench, KEYS, allowed_origins=(ours,)) as http:
        answer = await http.options("/v1/completions", headers=asked | {"Origin": ours})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ours
        assert (await http.options("/v1/completions", headers=asked | {"Origin": other})).status_code == 400
        answer = await http.post("/v1/completions", json=ASK, headers=bearer(KEYS["bob"]) | {"Origin": ours})
        assert answer.headers["access-control-allow-origin"] == ours
        exposed = set(answer.headers["access-control-expose-headers"].split(", "))
        assert exposed == EXPOSED, "a page can read these, and no other"
        answer = await http.post("/v1/completions", json=ASK, headers={"Origin": ours})
        assert error_of(answer, 401)
        assert answer.headers["access-control-allow-origin"] == ours, "a page can read why it is refused"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_waits_too_long_is_told_so_and_ends(bench: Bench, stream: bool) -> None:
    bench.script = lambda request: never(bench)
    async with served(bench, queue_timeout_s=0.5) as http:
        await http.post("/tokenize", json={"prompt": "x"})  # what a first request pays is paid
        error = error_of(await http.post("/v1/completions", json=ASK | {"stream": stream, "n": 2}), 503)
    assert (error["code"], error["type"]) == ("queue_timeout", "server_error")
    await eventually(lambda: len(bench.service.cancelled) == 2)
    assert bench.metric("num_requests_waiting") == bench.metric("num_requests_running") == 0


async def test_a_stream_that_gets_no_further_token_ends_with_an_error(bench: Bench) -> None:
    bench.script = lambda request: never(bench, "ok")
    async with served(bench, queue_timeout_s=2) as http:
        stream = await http.post("/v1/completions", json=ASK | {"stream": True})
    events = [json.loads(event.removeprefix("data: ")) for event in stream.text.strip().split("\n\n")]
    assert (events[0]["choices"][0]["text"], events[-1]["error"]["code"]) == ("ok", "queue_timeout")
    await eventually(lambda: len(bench.service.cancelled) == 1)


@pytest.mark.parametrize("by_header", [True, False])
async def test_an_answer_that_takes_too_long_ends_with_an_error(bench: Bench, by_header: bool) -> None:
    bench.script = lambda request: never(bench, "ok")
    headers = {"x-request-timeout-seconds": "0.8"} if by_header else {}
    async with served(bench, request_timeout_s=None if by_header else 0.3) as http:
        whole = await http.post("/v1/completions", json=ASK, headers=headers)
        assert (error_of(whole, 504)["code"], whole.headers["x-should-retry"]) == ("request_timeout", "false")
        stream = await http.post("/v1/completions", json=ASK | {"stream": True}, headers=headers)
    assert stream.status_code == 200
    events = [json.loads(event.removeprefix("data: ")) for event in stream.text.strip().split("\n\n")]
    assert events[0]["choices"][0]["text"] == "ok"
    assert events[-1]["error"]["code"] == "request_timeout"
    await eventually(lambda: len(bench.service.cancelled) == 2)


async def test_a_body_that_does_not_come_is_not_waited_for(bench: Bench) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.sleep(3)

    async with served(bench, body_timeout_s=0.2) as http:
        answer = await http.post("/v1/completions", content=body(), headers={"content-type": "application/json"})
    assert error_of(answer, 408)["code"] == "body_timeout"


async def test_what_fails_has_a_body_whole_or_as_an_event(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    said = bench.say("ok", 9, "length")[0]
    bench.script = lambda request: [
        TokenDelta(said.tokens, said.notes),
        SequenceFailedError("a hook raised", is_passing=request.spec.max_tokens == 5),
    ]
    async with served(bench) as http:
        headers = {"x-request-id": "mine"}
        answer = await http.post("/v1/completions", json=ASK, headers=headers)
        assert error_of(answer, 500)["code"] == "generation_failed"
        assert answer.headers["x-should-retry"] == "false", "it would fail again"
        answer = await http.post("/v1/completions", json=ASK | {"max_tokens": 5})
        assert error_of(answer, 503)
        assert "x-should-retry" not in answer.headers
        stream = await http.post("/v1/chat/completions", json=CHAT | {"stream": True, "request_id": "theirs"})
    events = [json.loads(event.removeprefix("data: ")) for event in stream.text.strip().split("\n\n")]
    assert events[-1]["error"]["message"] == "a hook raised"
    assert "request mine: a sequence failed, and the client gets an error: a hook raised" in caplog.text
    assert [request.spec.request_id for request in bench.service.opened][::2] == ["mine", "theirs"]
    assert "request theirs: a sequence failed, and the client gets an error: a hook raised" in caplog.text


async def test_what_was_not_foreseen_is_logged_with_its_traceback_and_the_requests_id(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.script = lambda request: [ZeroDivisionError("secret of the house")]
    async with served(bench) as http:
        assert error_of(await http.post("/v1/completions", json=ASK, headers={"x-request-id": "mine"}), 500)
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.name == "ray.serve"
    assert "request mine failed with an internal error" in record.getMessage()
    assert "ZeroDivisionError" in caplog.text


async def test_each_request_is_a_line(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    bench.says("a b c d e f g", 3)
    async with served(bench) as http:
        answer = await http.post("/v1/completions", json=ASK | {"n": 2}, headers={"x-request-id": "mine"})
        await http.post("/v1/completions", json=ASK | {"model": "nobody"})
        await http.get("/v1/models")
        await http.delete("/v1/responses/resp_1", headers={"x-request-id": "other"})
    usage = answer.json()["usage"]
    good, bad, deleted = [record.request for record in caplog.records if hasattr(record, "request")]
    assert good.pop("duration_s") >= good.pop("time_to_first_token_s") >= 0
    assert good.pop("draft_tokens") == good.pop("accepted_tokens") > 0
    assert good == {
        "request_id": "mine",
        "key": "",
        "model": "demo",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "finish": "stop",
    }
    assert (bad["status"], bad["time_to_first_token_s"], bad["finish"]) == (404, None, "")
    told = [deleted[name] for name in ("request_id", "method", "path", "status")]
    assert told == ["other", "DELETE", "/v1/responses/resp_1", 404]


async def test_no_path_breaks_a_line_of_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    async with served(bench) as http:
        await http.post("/v1/x%0Arequest request_id=forged")
    (line,) = [record.request for record in caplog.records if hasattr(record, "request")]
    assert line["path"] == "/v1/x%0Arequest%20request_id%3Dforged"
    assert "\nrequest request_id=forged" not in caplog.text


async def test_wherever_it_is_mounted_the_same_paths_are_open(bench: Bench) -> None:
    settings = ApiSettings(limits=limits(1, 0))
    app = create_app(bench.service, settings, bench.tokenizer, bench.observer, ApiKeys(KEYS))
    for root in ("", "/b"):
        transport = httpx2.ASGITransport(app=app, root_path=root)
        async with httpx2.AsyncClient(transport=transport, base_url="http://api") as http:
            assert (await http.post(f"{root}/ping")).status_code == 200
            assert (await http.get(f"{root}/docs")).status_code == 200
            assert (await http.get(f"{root}/v1/models")).status_code == 401
    transport = httpx2.ASGITransport(app=app, root_path="/b")
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as http:
        assert (await http.get("/by/ping")).status_code != 200


async def test_a_body_without_a_declared_length_counts_as_long_as_what_has_come(bench: Bench) -> None:
    bench.says("ok")
    gate, written = asyncio.Event(), json.dumps(ASK | {"user": "x" * 3000}).encode()

    async def body() -> AsyncIterator[bytes]:
        yield written[:100]
        await gate.wait()
        yield written[100:]

    bounds, headers = limits(40, 8, max_total_body_bytes=40_000), {"content-type": "application/json"}
    async with served(bench, bounds=bounds) as http, asyncio.TaskGroup() as group:
        slow = [group.create_task(http.post("/v1/completions", content=body(), headers=headers)) for _ in range(16)]
        await asyncio.sleep(0.05)
        assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        gate.set()
    statuses = Counter(task.result().status_code for task in slow)
    assert set(statuses) == {200, 429}, "what comes beyond the bound is refused as it comes"
    assert statuses[200] >= 12


async def test_what_waits_is_counted_until_its_first_token(bench: Bench) -> None:
    gate = asyncio.Event()
    bench.script = lambda request: [gate, *bench.say("ok")]
    bounds = limits(3, 4)
    async with served(bench, bounds=bounds) as http, asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(http.post("/v1/completions", json=ASK | {"n": 2}))
        await eventually(lambda: bench.metric("num_requests_waiting") == 6)
        assert len(bench.service.opened) == 2
        gate.set()
    assert bench.metric("num_requests_waiting") == bench.metric("num_requests_running") == 0
    assert bench.metric("time_to_first_token_seconds_count") == 6


@pytest.mark.parametrize("num_waiting", [0, 3])
async def test_overload_is_refused_and_all_that_was_taken_in_ends(bench: Bench, num_waiting: int) -> None:
    """While readers that stall hold every place: refusals have their bodies, and ``/health`` answers every time."""
    gate, open_now, most_open = asyncio.Event(), 0, 0

    def script(request: SequenceRequest) -> Iterator[Step]:
        nonlocal open_now, most_open
        open_now += 1
        most_open = max(most_open, open_now)
        yield TokenDelta(said.tokens, said.notes)
        yield gate
        open_now -= 1
        yield from bench.say("ok")

    said = bench.say("on", 9, "length")[0]
    bench.script = script
    bounds = limits(4, num_waiting, retry_after_s=3)
    async with served(bench, bounds=bounds) as http, AsyncExitStack() as stack:
        held = []
        for _ in range(4):
            held.append(
                await stack.enter_async_context(http.stream("POST", "/v1/completions", json=ASK | {"stream": True}))
            )
        waiting = [asyncio.create_task(http.post("/v1/completions", json=ASK)) for _ in range(num_waiting)]
        await eventually(lambda: bench.metric("num_requests_waiting") == num_waiting)
        for number in range(20):
            answer = await http.post("/v1/completions", json=ASK | {"n": 1 + number % 4, "stream": number % 2 == 0})
            assert error_of(answer, 429)["code"] == "overloaded"
            assert answer.headers["retry-after"] == "3"
            assert (await http.get("/health")).status_code == 200
        assert len(bench.service.opened) == 4
        gate.set()
        for stream in held:
            assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
        for task in waiting:
            assert (await task).json()["choices"][0]["text"] == "onok"
    assert (most_open, open_now) == (4, 0)
    assert len(bench.service.opened) == 4 + num_waiting
    assert not bench.service.cancelled


async def test_one_key_cannot_keep_others_out(bench: Bench) -> None:
    gates: list[asyncio.Event] = []

    def script(request: SequenceRequest) -> list[Step]:
        gates.append(asyncio.Event())
        return [gates[-1], *bench.say("ok")]

    bench.script = script
    bounds = limits(2, 4, max_share_per_key=0.5)
    async with served(bench, KEYS, bounds=bounds) as http:
        ended: list[str] = []

        async def ask(name: str) -> None:
            assert (await http.post("/v1/completions", json=ASK, headers=bearer(KEYS[name]))).status_code == 200
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(ask("alice"))
            await eventually(lambda: bench.metric("num_requests_waiting") == 5)
            group.create_task(ask("bob"))
            await eventually(lambda: bench.metric("num_requests_waiting") == 6)
            for number in range(6):
                await eventually(lambda number=number: len(gates) > number)
                gates[number].set()
                await eventually(lambda number=number: len(ended) == number + 1)
    assert ended.index("bob") <= 2


async def test_what_goes_with_a_prompt_counts_as_tokens(bench: Bench) -> None:
    bench.says("ok")
    base = ASK | {"prompt": [5], "max_tokens": 1, "n": 2}
    ids = list(range(100))
    async with served(bench, max_total_tokens=103) as http:
        for fields, num_tokens in (
            ({"stop_token_ids": ids}, 4 + 2 * 100),
            ({"logit_bias": dict.fromkeys(map(str, ids[:50]), 1)}, 4 + 2 * 2 * 50),
            ({"allowed_token_ids": ids}, 4 + 100),
            ({"guided_regex": "a" * 398}, 4 + 2 * 100),
        ):
            error = error_of(await http.post("/v1/completions", json=base | fields), 400)
            assert f"(limits.max_total_tokens), not {num_tokens}" in error["message"]
            assert error["code"] == "request_too_large"
        for fields in ({"allowed_token_ids": ids[:99]}, {"bad_words": ["a"]}, {"stop_token_ids": ids[:49]}):
            assert (await http.post("/v1/completions", json=base | fields)).status_code == 200


async def test_a_long_list_of_ids_is_refused_for_its_length(bench: Bench) -> None:
    async with served(bench, max_body_bytes=4 << 20) as http:
        for prompt in ([5] * 1_000_000, [[5], [-1] * 500_000]):
            error = error_of(await http.post("/v1/completions", json=ASK | {"prompt": prompt}), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        error = error_of(await http.post("/v1/completions", json=ASK | {"prompt": [5] * 9 + [4096]}), 400)
        assert "4096 at index 9" in error["message"]
    assert not bench.service.opened
    assert MAX_MODEL_LEN < 500_000


async def test_while_it_drains_requests_are_sent_elsewhere(bench: Bench) -> None:
    async with served(bench) as http:
        bench.service.unhealthy = ServiceUnavailableError("this ingress drains")
        for stream in (False, True):
            assert error_of(await http.post("/v1/completions", json=ASK | {"stream": stream}), 503)
