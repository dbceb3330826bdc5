"""Whole conversations with tools: the official client's helpers, the API, and the demo pair in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Annotated, Any, Literal

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerFast

from deployments.http.app import create_app
from deployments.http.service import ApiSettings

from .engine_service import EngineService
from .test_tools import LLAMA_LIKE, RESPONSE_TEMPLATE


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo", "Lima"]
    days: Annotated[int, Field(ge=1, le=9)]


class Order(BaseModel):
    """A table in a restaurant."""

    kind: Literal["inside", "outside"]
    names: Annotated[list[Annotated[str, Field(max_length=6)]], Field(max_length=2)]


TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Order)]
KINDS: dict[str, type[BaseModel]] = {"Weather": Weather, "Order": Order}
ASK: dict[str, Any] = {"role": "user", "content": "Where can I sit outside?"}


@pytest.fixture(scope="module")
def service() -> EngineService:
    return EngineService()


@asynccontextmanager
async def client_of(service: EngineService, tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[AsyncOpenAI]:
    app = create_app(service, ApiSettings(unknown_fields="refuse", trust_request_chat_template=True), tokenizer)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as http:
        yield AsyncOpenAI(api_key="none", base_url="http://api/v1", http_client=http, max_retries=0)


@pytest.fixture
async def client(service: EngineService, tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(service, tokenizer) as client:
        yield client


def run(call: Any) -> dict[str, Any]:
    """What the tool of a call says, once its arguments are found to be valid."""
    arguments = KINDS[call.function.name].model_validate_json(call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: {len(repr(arguments))}"}


async def turn(client: AsyncOpenAI, messages: list[dict[str, Any]], stream: bool, **options: Any) -> Any:
    options = {"model": "demo", "messages": messages, "tools": TOOLS, "max_tokens": 120, "seed": 3} | options
    if not stream:
        return (await client.chat.completions.create(**options)).choices[0]
    async with client.chat.completions.stream(**options) as events:
        async for _ in events:
            pass
        return (await events.get_final_completion()).choices[0]


@pytest.mark.parametrize(("temperature", "stream"), [(0.0, False), (1.0, True)])
async def test_a_loop_of_two_calls_and_an_answer(
    client: AsyncOpenAI, service: EngineService, temperature: float, stream: bool
) -> None:
    """Well-formed, not wise: the demo pair writes Python."""
    messages = [ASK]
    options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": temperature}
    for _ in range(2):
        choice = await turn(client, messages, stream, **options)
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        messages += [choice.message.model_dump(), run(call)]
    choice = await turn(client, messages, False, tool_choice="none", temperature=temperature, max_tokens=12)
    assert choice.message.content
    assert not choice.message.tool_calls


@pytest.mark.parametrize("template", ["", LLAMA_LIKE], ids=["hermes", "llama3"])
@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_drafts_change_nothing(client: AsyncOpenAI, service: EngineService, choice: str, template: str) -> None:
    del service.outputs[:]
    for count in (0, 4):
        extra = {"num_speculative_tokens": count} | ({"chat_template": template} if template else {})
        await turn(client, [ASK], False, tool_choice=choice, max_tokens=50, temperature=1.0, extra_body=extra)
    assert len(service.outputs) == 2
    assert len(set(service.outputs)) == 1
    assert service.opened[-1].spec.sampling.grammar is not None


async def test_drafts_change_nothing_that_a_response_template_reads(
    service: EngineService, tokenizer: PreTrainedTokenizerFast
) -> None:
    del service.outputs[:]
    own = deepcopy(tokenizer)
    own.response_template = RESPONSE_TEMPLATE
    options = {"tool_choice": "auto", "max_tokens": 50, "temperature": 1.0}
    async with client_of(service, own) as client:
        answers = [
            (await turn(client, [ASK], False, extra_body={"num_speculative_tokens": count}, **options)).message
            for count in (0, 4)
        ]
    assert answers[0] == answers[1]
    assert len(service.outputs) == 2
    assert len(set(service.outputs)) == 1


async def test_several_calls_of_several_choices(client: AsyncOpenAI) -> None:
    """The demo pair goes on with another call, until it is cut off."""
    answer = await client.chat.completions.create(
        model="demo", messages=[ASK], tools=TOOLS, tool_choice="required", n=2, temperature=1.0, max_tokens=90, seed=2
    )
    for choice in answer.choices:
        *calls, last = choice.message.tool_calls
        assert calls
        for call in calls:
            run(call)
        assert choice.finish_reason == "length" or run(last)


@pytest.mark.parametrize("name", ["Weather", "Order"])
async def test_a_named_function_by_the_clients_parser(client: AsyncOpenAI, name: str) -> None:
    answer = await client.chat.completions.parse(
        model="demo",
        messages=[ASK],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": name}},
        temperature=1.0,
        seed=1,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, KINDS[name])


async def test_a_free_choice_may_end_in_content(client: AsyncOpenAI) -> None:
    choice = await turn(client, [ASK], False, temperature=1.0, max_tokens=24)
    assert choice.message.content
    assert not choice.message.tool_calls


async def test_an_answer_by_a_format_or_a_call(client: AsyncOpenAI) -> None:
    for seed in range(2):
        answer = await client.chat.completions.parse(
            model="demo",
            messages=[ASK],
            tools=[TOOLS[0]],
            response_format=Order,
            temperature=1.0,
            seed=seed,
        )
        (choice,) = answer.choices
        if choice.message.tool_calls:
            assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Weather)
        else:
            assert isinstance(choice.message.parsed, Order)


async def test_events_of_the_clients_stream(client: AsyncOpenAI) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 5}
    kinds: list[str] = []
    pieces: list[str] = []
    async with client.chat.completions.stream(
        model="demo", messages=[ASK], tools=TOOLS, max_tokens=120, **options
    ) as events:
        async for event in events:
            kinds.append(event.type)
            if event.type == "tool_calls.function.arguments.delta":
                pieces.append(event.arguments_delta)
            if event.type == "tool_calls.function.arguments.done":
                done = event
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert len(pieces) > 2
    assert "".join(pieces) == done.arguments
    assert isinstance(done.parsed_arguments, KINDS[done.name])
    assert json.loads(done.arguments)
