"""The overload script, against a small service that refuses what is too much."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fastapi import FastAPI
from transformers import AutoTokenizer

import specdec.demo
from deployments.openai import ApiSettings, ModelInfo, SequenceRequest, ServedModel, create_app
from deployments.openai.admission import AdmissionLimits
from deployments.openai.scripted import ScriptedService, Step, rounds
from tests.bench.overload import measure
from tests.deployments.openai.conftest import listening


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
    return create_app(tokens, ApiSettings(admission=AdmissionLimits(2, 1)), tokenizer)


async def test_answers_refusals_and_health_are_counted() -> None:
    async with listening(service()) as url:
        alone, many = await measure(url, 1, 0.2, 8), await measure(url, 8, 0.2, 8)
    assert not +alone.refusals
    assert alone.num_tokens % 8 == many.num_tokens % 8 == 0
    assert min(alone.num_tokens, many.num_tokens) > 0
    assert set(+many.refusals) == {429}
    assert many.num_healthy == many.num_polls > 0
