from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
from openai import AsyncOpenAI

from .conftest import MAX_MODEL_LEN, TEXT, Bench


async def test_models(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["demo"]
    assert models[0] == await client.models.retrieve("demo")
    assert (models[0].created, models[0].object) == (7, "model")


async def test_tokens_there_and_back(bench: Bench, http: httpx2.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"prompt": TEXT, "model": "demo", "return_token_strs": True})).json()
    assert answer["tokens"] == bench.tokenizer.encode(TEXT)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    back = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": TEXT}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_tokens_of_a_long_text(bench: Bench, http: httpx2.AsyncClient) -> None:
    answer = await http.post("/tokenize", json={"prompt": TEXT * 1000})
    assert answer.json()["tokens"] == bench.tokenizer.encode(TEXT * 1000)


async def test_tokens_of_a_conversation(bench: Bench, http: httpx2.AsyncClient) -> None:
    answer = await http.post("/tokenize", json={"messages": [{"role": "user", "content": "Add."}]})
    assert bench.tokenizer.decode(answer.json()["tokens"]) == "<|endoftext|># Add.\n"


async def test_tokens_of_an_unknown_model(refused: Callable[..., Any]) -> None:
    assert (await refused("/tokenize", {"prompt": "x", "model": "no"}, 404))["code"] == "model_not_found"


async def test_health(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200


async def test_the_schema_describes_the_bodies(http: httpx2.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    body = schema["components"]["schemas"]["CompletionBody"]
    assert body["required"] == ["model", "prompt"]
    assert body["additionalProperties"] is True
