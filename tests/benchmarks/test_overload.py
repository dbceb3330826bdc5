"""The overload script, against a small service that refuses what is too much."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from transformers import AutoTokenizer

import specdec.demo
from benchmarks.overload import measure, stall
from deployments.openai import ApiSettings, ModelInfo, SequenceRequest, ServedModel, create_app
from tests.deployments.openai.conftest import limits, listening
from tests.deployments.openai.scripted import ScriptedService, Step, rounds


def service() -> FastAPI:
    gates: list[asyncio.Event] = []

    def script(request: SequenceRequest) -> Iterator[Step]:
        gate = asyncio.Event()
        gates.append(gate)
        asyncio.get_running_loop().call_later(0.02, gate.set)
        yield gate
        yield from rounds(range(5, 13), 4, "length")

    tokenizer = AutoTokenizer.from_pretrained(f"{specdec.demo.__path__[0]}/target")
    tokens = ScriptedService(ModelInfo(ServedModel("demo", "target", 128, 4096)), script)
    return create_app(tokens, ApiSettings(limits=limits(2, 1)), tokenizer)


async def test_answers_refusals_and_health_are_counted() -> None:
    async with listening(service()) as url:
        alone, many = await measure(url, 1, 0.2, 8), await measure(url, 8, 0.2, 8)
    assert not alone.refusals
    assert alone.num_tokens == 8 * alone.num_whole > 0
    assert many.num_tokens == 8 * many.num_whole > 0
    assert set(many.refusals) == {429}
    assert many.num_healthy == many.num_polls > 0
    assert not many.faults(2)


async def test_what_must_not_be_is_told() -> None:
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": [{"id": "demo"}]})
    app.post("/v1/completions", status_code=429)(lambda: {"error": "go away"})
    app.get("/metrics", response_class=PlainTextResponse)(lambda: "specdec_num_requests_running{} 3\n")
    async with listening(app) as url:
        load = await measure(url, 1, 0, 8)
    faults = "\n".join(load.faults(2))
    assert "1 refusals without a body" in faults
    assert "1 sequences beyond the limit" in faults
    assert "polls of /health without 200" in faults


async def test_readers_that_stall_read_all_in_the_end() -> None:
    async with listening(service()) as url:
        load = await stall(url, 2, 0.1, 8, 4)
    assert load.num_whole >= 2
    assert load.num_whole + load.refusals[429] == 2 + 4
    assert not load.faults(2)
