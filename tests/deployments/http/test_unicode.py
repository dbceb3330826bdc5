"""Text outside ASCII comes whole through every endpoint, though a token is a part of a character."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from deployments.transport.wire import Messages, decode, encode
from specdec.core.messages import Submit
from specdec.core.tokens import SharedTokens
from tests.deployments.http.conftest import Bench

TEXTS = {
    "Chinese and Japanese": "你好、世界。こんにちは",
    "emoji with joiners": "👩‍👩‍👧‍👦 🇩🇪 🙂",
    "right to left": "שלום مرحبا",
    "combining marks": "e\u0301 n\u0303 देवनागरी",
}
MESSAGES = [{"role": "user", "content": "你好 👋"}]
BODIES = {
    "/v1/completions": {"prompt": "你好 👋"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "你好 👋"},
}


def text_of(answer: dict[str, Any]) -> str:
    """Of a whole answer, a chunk, or an event with a piece."""
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    if "choices" not in answer:
        return answer["delta"] if answer.get("type") == "response.output_text.delta" else ""
    (choice,) = answer["choices"]
    said = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or said.get("content") or ""


async def pieces(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    answer = await http.post(path, json=body | {"model": "demo", "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [text_of(json.loads(line)) for line in lines]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", TEXTS)
async def test_a_text_is_the_same_whole_and_in_pieces(
    bench: Bench, http: httpx2.AsyncClient, name: str, path: str
) -> None:
    bench.says(TEXTS[name])
    answer = await http.post(path, json=BODIES[path] | {"model": "demo"})
    assert text_of(answer.json()) == TEXTS[name]
    found = await pieces(http, path, BODIES[path])
    assert "".join(found) == TEXTS[name]
    assert len([piece for piece in found if piece]) > 3
    assert not any("\ufffd" in piece for piece in found)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", ["終わり", "👩‍👧", "مرحبا"])
async def test_a_stop_string_ends_the_text_before_it(
    bench: Bench, http: httpx2.AsyncClient, stop: str, path: str
) -> None:
    bench.says(f"世界 {stop} more")
    body = BODIES[path] | {"stop": [stop]}
    assert text_of((await http.post(path, json=body | {"model": "demo"})).json()) == "世界 "
    assert "".join(await pieces(http, path, body)) == "世界 "


async def test_a_prompt_of_32k_tokens_is_whole_at_every_endpoint_and_on_the_wire(bench: Bench) -> None:
    long = Bench(bench.tokenizer, max_model_len=1 << 16)
    text = "世界 🙂 ünd\n"
    text *= 32_768 // len(bench.tokenizer.encode(text, add_special_tokens=False)) + 1
    ids = bench.tokenizer.encode(text)
    assert len(ids) >= 32_768
    long.says("ok")
    asked = {
        "/v1/completions": [{"prompt": text}, {"prompt": ids}],
        "/v1/chat/completions": [{"messages": [{"role": "user", "content": text}]}],
        "/v1/responses": [{"input": text}],
    }
    transport = httpx2.ASGITransport(app=long.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as http:
        for path, bodies in asked.items():
            for body in bodies:
                answer = await http.post(path, json=body | {"model": "demo"})
                assert text_of(answer.json()) == "ok", answer.text
        tokens = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
    assert tokens == ids
    assert [len(request.prompt) >= 32_768 for request in long.service.opened] == [True] * 4
    for request in long.service.opened:
        read = bench.tokenizer.decode(list(request.prompt))
        assert [read.count(part) for part in ("世界", "🙂", "ünd")] == [text.count("世界")] * 3
    submit = Submit("s", 1, "i", SharedTokens(long.service.opened[0].prompt), long.service.opened[0].spec)
    assert decode(encode(Messages((submit,))), Messages).batch == (submit,)
