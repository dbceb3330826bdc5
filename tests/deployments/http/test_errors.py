from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from deployments.http.service import ApiSettings
from specdec.core.errors import ServiceUnavailableError
from specdec.protocol.ingress import TokenDelta

from .conftest import Bench

COMPLETION = {"model": "demo", "prompt": "x"}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}


def body_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_template_is_taken_only_where_requests_are_trusted(tokenizer: Any) -> None:
    bench = Bench(tokenizer, ApiSettings())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        answer = await http.post("/v1/chat/completions", json=CHAT | {"chat_template": "x"})
    error = body_of(answer, 400)
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "demo", "prompt": "\\ud83d"}',
        b'{"model": "demo", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "demo", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
async def test_what_is_no_json_object_is_refused(http: httpx2.AsyncClient, content: bytes) -> None:
    answer = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert body_of(answer, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'"temperature": NaN', "temperature"),
        (b'"temperature": -Infinity', "temperature"),
        (b'"temperature": 1e999', "temperature"),
        (b'"metadata": {"a": [0, {"b": NaN}]}', "metadata.a[1].b"),
    ],
)
async def test_a_number_that_is_none_is_named(http: httpx2.AsyncClient, content: bytes, param: str) -> None:
    body = b'{"model": "demo", "prompt": "x", ' + content + b"}"
    answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = body_of(answer, 400)
    assert (error["param"], error["code"]) == (param, "invalid_value")


async def test_a_body_that_does_not_say_it_is_json_is_refused(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=json.dumps(COMPLETION), headers={"content-type": "text/plain"})
    assert "application/json" in body_of(answer, 400)["message"]


async def test_many_errors_are_as_quick_as_one(http: httpx2.AsyncClient) -> None:
    fields = {f"f{i}": 1 for i in range(40_000)}
    for body in (
        COMPLETION | {"temperatur": 1} | fields | {"stream_options": fields},
        COMPLETION | {"stop_token_ids": ["x"] * 40_000},
        COMPLETION | {"stop": [1] * 40_000},
        COMPLETION | {"logit_bias": dict.fromkeys(fields, 1)},
        CHAT | {"messages": [{}] * 40_000},
    ):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await http.post(path, json=body)
        assert len(body_of(answer, 400)["message"]) < 500


@pytest.mark.parametrize("name", ["gpt-4", "demo/", "DEMO"])
async def test_an_unknown_model_is_404(client: AsyncOpenAI, name: str) -> None:
    for send in (
        client.completions.create(model=name, prompt="x"),
        client.chat.completions.create(model=name, messages=CHAT["messages"], stream=True),
        client.models.retrieve(name),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await send
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_unknown_paths_and_methods(http: httpx2.AsyncClient) -> None:
    assert body_of(await http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert body_of(await http.post("/", json={}), 405)["code"] == "method_not_allowed"
    answer = await http.get("/v1/completions")
    assert body_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_internal_errors_tell_nothing(bench: Bench, http: httpx2.AsyncClient, path: str, stream: bool) -> None:
    bench.script = lambda request: [KeyError("secret of the house")]
    body = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}.get(path, {"model": "demo", "input": "x"})
    answer = await http.post(path, json=body | {"stream": stream})
    assert body_of(answer, 500)["code"] == "internal_error"
    assert "secret" not in answer.text


async def test_an_error_outside_the_routes_is_answered_too(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.service.unhealthy = OSError("secret of the house")
    answer = await http.get("/v1/models")
    assert body_of(answer, 500)["type"] == "server_error"
    assert "secret" not in answer.text


async def test_a_service_that_is_not_ready(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.service.unhealthy = ServiceUnavailableError("loading the models")
    for answer in (await http.get("/health"), await http.post("/v1/completions", json=COMPLETION)):
        error = body_of(answer, 503)
        assert (error["message"], error["code"]) == ("loading the models", "service_unavailable")
        assert answer.headers["retry-after"] == "1"


async def test_an_error_after_the_headers_is_an_event_and_the_end(bench: Bench, http: httpx2.AsyncClient) -> None:
    error = ServiceUnavailableError("the last target is gone")
    bench.script = lambda request: [*bench.say("ok")[:1], error]
    answer = await http.post("/v1/completions", json=COMPLETION | {"stream": True, "n": 2})
    assert answer.status_code == 200
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "the last target is gone"
    assert "[DONE]" not in answer.text
    assert bench.metric("num_requests_running") == 0
    client = AsyncOpenAI(api_key="none", base_url="http://api/v1", http_client=http, max_retries=0)
    with pytest.raises(openai.APIError, match="the last target is gone"):
        async for _ in await client.completions.create(model="demo", prompt="x", stream=True):
            pass


async def test_a_sequence_without_an_end_is_an_error(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.script = lambda request: [TokenDelta()]
    assert body_of(await http.post("/v1/completions", json=COMPLETION), 500)["code"] == "internal_error"


async def test_request_ids_are_honoured(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("ok")
    answer = await http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    for bad in ("", "a b", "x" * 200):
        answer = await http.get("/v1/nothing", headers={"x-request-id": bad})
        assert len(answer.headers["x-request-id"]) == 32
