"""Whole conversations with tools by the official client's helpers for responses, and the demo pair in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ParsedResponse, ResponseFunctionToolCall
from transformers import PreTrainedTokenizerFast

from deployments.http.app import create_app
from deployments.http.service import ApiSettings

from ..engine_service import EngineService
from ..test_tool_loop import KINDS, Order, Weather

TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Order)]
ASK = {"role": "user", "content": "Where can I sit outside?"}


@pytest.fixture(scope="module")
def service() -> EngineService:
    return EngineService()


@pytest.fixture
async def client(service: EngineService, tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[AsyncOpenAI]:
    app = create_app(service, ApiSettings(unknown_fields="refuse"), tokenizer)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as http:
        yield AsyncOpenAI(api_key="none", base_url="http://api/v1", http_client=http, max_retries=0)


async def turn(client: AsyncOpenAI, items: list[Any], stream: bool, **options: Any) -> ParsedResponse[Any]:
    options = {"model": "demo", "input": items, "max_output_tokens": 120, "extra_body": {"seed": 3}} | options
    if not stream:
        return await client.responses.parse(**options)
    async with client.responses.stream(**options) as events:
        async for _ in events:
            pass
        return await events.get_final_response()


@pytest.mark.parametrize(("temperature", "stream"), [(0.0, False), (1.0, True)])
async def test_a_loop_of_two_calls_and_an_answer(client: AsyncOpenAI, temperature: float, stream: bool) -> None:
    """Well-formed, not wise: the demo pair writes Python."""
    items: list[Any] = [ASK]
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": temperature}
    for _ in range(2):
        response = await turn(client, items, stream, **options)
        assert response.status == "completed"
        (call,) = response.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert isinstance(call.parsed_arguments, KINDS[call.name])
        result = {"type": "function_call_output", "call_id": call.call_id, "output": repr(call.parsed_arguments)}
        sent = call.model_dump()
        items += [sent, result]
    response = await turn(client, items, stream, tool_choice="none", temperature=temperature, text_format=Order)
    assert isinstance(response.output_parsed, Order)


async def test_drafts_change_nothing(client: AsyncOpenAI, service: EngineService) -> None:
    del service.outputs[:]
    for count in (0, 4):
        extra = {"num_speculative_tokens": count, "seed": 4}
        options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
        await turn(client, [ASK], False, **options, extra_body=extra)
    assert len(service.outputs) == 2
    assert len(set(service.outputs)) == 1
