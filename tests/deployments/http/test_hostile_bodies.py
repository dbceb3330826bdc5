"""Bodies made to hurt: huge, deep, of wrong types, half characters. Each is answered below 500."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx2
import pytest
from fastapi import APIRouter
from pydantic import BaseModel, field_validator
from transformers import PreTrainedTokenizerFast

from cluster.config.limits import Limits
from deployments.http.schemas.chat import ChatBody, CompletionBody
from deployments.http.schemas.responses import ResponsesBody
from deployments.http.service import ApiSettings
from deployments.http.strict_json import StrictJsonRoute

from .conftest import Bench

JSON = {"content-type": "application/json"}
PROMPT = b'{"model": "demo", "prompt": "x", '
CHAT = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], '
RESPONSE = b'{"model": "demo", "input": "x", '
BEGINNINGS = {
    CompletionBody: ("/v1/completions", PROMPT),
    ChatBody: ("/v1/chat/completions", CHAT),
    ResponsesBody: ("/v1/responses", RESPONSE),
}
DEEP = b"[" * 100_000
OBJECTS = b'{"a":' * 100_000
LONG = b"x" * (1 << 20)

RAW: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "a number": b"1e999",
    "half a body": PROMPT,
    "two bodies": PROMPT + b'"n": 1}{}',
    "bad UTF-8": PROMPT + b'"user": "\xff\xfe\xc3\x28"}',
    "bad UTF-8 in a name": PROMPT + b'"us\xffer": 1}',
    "half a surrogate pair": PROMPT + b'"stop": "\\ud83d"}',
    "a surrogate pair in bad words": PROMPT + b'"bad_words": ["\\udc00"]}',
    "UTF-16": '{"model": "demo", "prompt": "x"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + PROMPT + b'"n": 1}',
    "NUL": PROMPT + b'"stop": "\\u0000", "user": "\\u0000"}',
    "NaN": PROMPT + b'"logit_bias": {"1": NaN}}',
    "a nested NaN": PROMPT + b'"metadata": {"a": [[[-Infinity]]]}}',
    "deep arrays": PROMPT + b'"metadata": ' + DEEP,
    "deep arrays that end": PROMPT + b'"prompt": ' + DEEP + b"]" * 100_000 + b"}",
    "deep objects": CHAT + b'"chat_template_kwargs": ' + OBJECTS,
    "a stop string of 1 MB": PROMPT + b'"stop": "' + LONG + b'"}',
    "a bad word of 1 MB": PROMPT + b'"bad_words": ["' + LONG + b'"]}',
    "a name of 1 MB": PROMPT + b'"' + LONG + b'": 1}',
    "a model of 1 MB": b'{"prompt": "x", "model": "' + LONG + b'"}',
    "a role of 1 MB": b'{"model": "demo", "messages": [{"content": "x", "role": "' + LONG + b'"}]}',
    "a request id with a line end": PROMPT + b'"request_id": "a\\r\\nx: y"}',
    "a number of 100 kB": PROMPT + b'"seed": ' + b"9" * 100_000 + b"}",
    "a million ids": b'{"model": "demo", "prompt": [' + b"1," * 1_000_000 + b"1]}",
    "a hundred thousand prompts": b'{"model": "demo", "prompt": [' + b'"a",' * 100_000 + b'"a"]}',
    "a hundred thousand messages": b'{"model": "demo", "messages": [' + b"{}," * 100_000 + b"{}]}",
    "a hundred thousand parts": b'{"model": "demo", "messages": [{"role": "user", "content": ['
    + b'{"type": "text", "text": ""},' * 100_000
    + b'{"type": "text", "text": ""}]}]}',
    "a hundred thousand items": b'{"model": "demo", "input": [' + b"{}," * 100_000 + b"{}]}",
    "eight thousand good items": b'{"model": "demo", "input": ['
    + b'{"role":"user","content":"x"},' * 8_000
    + b'{"role":"user","content":"x"}]}',
    "deep items": b'{"model": "demo", "input": [{"role": "user", "content": ' + DEEP,
    "an item's type of 1 MB": b'{"model": "demo", "input": [{"type": "' + LONG + b'"}]}',
    "metadata's name of 1 MB": RESPONSE + b'"metadata": {"' + LONG + b'": "x"}}',
    "a hundred thousand unknown fields": PROMPT + b",".join(b'"f%d": 1' % i for i in range(100_000)) + b"}",
    "a hundred thousand allowed ids": PROMPT + b'"allowed_token_ids": [' + b"7," * 100_000 + b"7]}",
    "one field twice": PROMPT + b'"n": 1, "n": 2}',
}
WRONG: list[Any] = [True, -1, 2**70, 1e308, "", "x", [], [[]], [None], {}, {"a": {}}, [1, "x"], {"1": None}]


@pytest.fixture
def bench(tokenizer: PreTrainedTokenizerFast) -> Bench:
    """One that reads larger bodies than by default."""
    return Bench(tokenizer, ApiSettings(Limits(max_body_bytes=4 << 20), trust_request_chat_template=True))


def paths_of(content: bytes) -> list[str]:
    """Where a raw body is sent."""
    if b'"input"' in content:
        return ["/v1/responses"]
    return ["/v1/chat/completions"] if b"messages" in content else ["/v1/completions", "/tokenize", "/detokenize"]


async def answered(bench: Bench, http: httpx2.AsyncClient, path: str, content: bytes) -> None:
    answer = await http.post(path, content=content, headers=JSON)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text) < 100_000
    assert all(len(value) < 8192 for value in answer.headers.values())
    for gauge in ("num_requests_running", "num_requests_waiting"):
        assert bench.metric(gauge) == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", RAW)
async def test_a_raw_body_is_answered(bench: Bench, http: httpx2.AsyncClient, name: str) -> None:
    bench.says("ok")
    content = RAW[name]
    for path in paths_of(content):
        await answered(bench, http, path, content)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ResponsesBody])
async def test_every_field_takes_every_wrong_type(bench: Bench, http: httpx2.AsyncClient, kind: Any) -> None:
    """Alone, and some fields at once."""
    bench.says("ok")
    path, begin = BEGINNINGS[kind]
    base = json.loads(begin[:-2] + b"}")
    rng = random.Random(7)
    bodies = [{name: value} for name in kind.model_fields for value in rng.sample(WRONG, 5)]
    for _ in range(100):
        names = rng.sample(list(kind.model_fields), 4)
        bodies.append({name: rng.choice(WRONG) for name in names})
    for body in bodies:
        await answered(bench, http, path, json.dumps(base | body).encode())


def _with_fields(num_fields: int) -> bytes:
    return json.dumps({"model": "demo", "prompt": "x"} | {f"field_{i}": ":" for i in range(num_fields - 2)}).encode()


async def test_a_body_may_have_so_many_fields_and_no_more(http: httpx2.AsyncClient, bench: Bench) -> None:
    bench.says("ok")
    answer = await http.post("/v1/completions", content=_with_fields(16384), headers=JSON)
    assert answer.status_code == 200, answer.text
    messages = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x", "a": 1}] * 6000}).encode()
    for path, content in (("/v1/completions", _with_fields(16385)), ("/v1/chat/completions", messages)):
        answer = await http.post(path, content=content, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "the body must have at most 16384 fields"


async def test_what_strings_hold_is_no_part_of_a_body(http: httpx2.AsyncClient, bench: Bench) -> None:
    bench.says("ok")
    rng = random.Random(7)
    texts = ["".join(rng.choices('\\":[{n,]}', k=rng.randrange(60))) for _ in range(8000)]
    messages = [{"role": "user", "content": text} for text in texts]
    content = json.dumps({"model": "demo", "messages": messages, "max_tokens": 1}).encode()
    assert min(content.count(sign) for sign in (b"[", b"{", b":")) > 16384
    answer = await http.post("/v1/chat/completions", content=content, headers=JSON)
    assert "context_length_exceeded" in answer.text


@pytest.mark.parametrize(
    ("part", "count", "what"),
    [(b"[]", 16384, "lists and objects"), (b"{}", 16384, "lists and objects"), (b'"[\\""', 65536, "strings")],
)
async def test_a_body_has_so_many_parts_and_no_more(
    http: httpx2.AsyncClient, bench: Bench, part: bytes, count: int, what: str
) -> None:
    bench.says("ok")
    used = 2 if what == "lists and objects" else 5  # of its own
    for more, status in ((0, 200), (1, 400)):
        content = PROMPT + b'"metadata": [' + b",".join([part] * (count - used + more)) + b"]}"
        answer = await http.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"] == f"the body must have at most {count} {what}"


def arrays(schema: Any) -> Iterator[dict[str, Any]]:
    """All arrays that a schema describes."""
    if isinstance(schema, dict) and schema.get("type") == "array":
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from arrays(part)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ResponsesBody])
def test_every_list_has_a_maximum(kind: Any) -> None:
    """Lists of token ids have theirs from the model, and from the size of a body."""
    found = list(arrays(kind.model_json_schema()))
    assert len(found) > 3
    for array in found:
        assert "maxItems" in array or array["items"] == {"type": "integer"}, array


CALL = {"name": "f", "arguments": json.dumps({"q": "\ud83d"})}
CALLED: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    "/v1/responses": ({"type": "function_call", "call_id": "1", **CALL}, "input[1].arguments"),
}


@pytest.mark.parametrize("path", CALLED)
async def test_half_a_surrogate_pair_in_the_json_of_arguments_is_named(http: httpx2.AsyncClient, path: str) -> None:
    turn, param = CALLED[path]
    name = "messages" if "chat" in path else "input"
    answer = await http.post(path, json={"model": "demo", name: [{"role": "user", "content": "x"}, turn]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "hex escape" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_number_beyond_all_floats_is_named(bench: Bench, http: httpx2.AsyncClient, stream: bytes) -> None:
    bench.says("ok")
    tools = b'[{"type": "function", "name": "f", "parameters": {"properties": {"a": {"maximum": 1e400}}}}]'
    content = RESPONSE + b'"tool_choice": "none", "tools": ' + tools + b', "stream": ' + stream + b"}"
    answer = await http.post("/v1/responses", content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "tools[0].parameters.properties.a.maximum"
    assert "finite" in answer.json()["error"]["message"]


class Checked(BaseModel):
    """A body that notes whether the event loop's thread checks it."""

    on_loop: ClassVar[list[bool]] = []

    text: str

    @field_validator("text")
    @classmethod
    def _seen(cls, text: str) -> str:
        cls.on_loop.append(threading.current_thread() is threading.main_thread())
        if text.startswith("bad"):
            raise ValueError("it is bad")
        return text


async def test_a_large_body_is_checked_beside_the_event_loop(bench: Bench, http: httpx2.AsyncClient) -> None:
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/checked")
    async def take(body: Checked) -> int:
        return len(body.text)

    bench.app.include_router(router)
    for text, status in (("x", 200), ("x" * 100_000, 200), ("bad" * 100_000, 400), ("bad", 400)):
        answer = await http.post("/checked", json={"text": text})
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "text"
    assert Checked.on_loop == [True, False, False, True]
