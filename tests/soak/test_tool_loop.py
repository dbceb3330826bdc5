"""A loop of tools that means something: the official client's helpers, the API, and a real instruction model."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from cluster.models.demos import make_chat_target
from deployments.http.app import create_app
from deployments.http.service import ApiSettings
from tests.deployments.http.engine_service import EngineService

pytestmark = pytest.mark.timeout(1800)

TEMPLATE = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.
{%- if tools %} You may call these functions:
{%- for tool in tools %}
{{ tool.function | tojson }}
{%- endfor %}
A call is written as <tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
{%- endif %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{%- if m.role == 'tool' %}
The function says: {{ m.content }} Answer my question in one sentence.
{%- else %}
{{ m.content or '' }}
{%- endif %}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Its own knows no tools."""


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Annotated[str, Field(max_length=20)]
    unit: Literal["celsius", "fahrenheit"]


class Answer(BaseModel):
    """What the weather is."""

    city: Annotated[str, Field(max_length=20)]
    is_sunny: bool


ASK: dict[str, Any] = {"role": "user", "content": "What is the weather in Rome, in celsius?"}
OPTIONS: dict[str, Any] = {"model": "demo", "temperature": 0.0, "seed": 1, "max_tokens": 60}


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return make_chat_target(Path(sys.prefix) / "smollm2")
    except OSError as error:
        pytest.skip(f"the model's package cannot be had: {error}")


@pytest.fixture(scope="module")
def service(model: Path) -> EngineService:
    return EngineService(target=model, draft=None)


@pytest.fixture
async def client(service: EngineService, model: Path) -> AsyncIterator[AsyncOpenAI]:
    settings = ApiSettings(unknown_fields="refuse", chat_template=TEMPLATE)
    app = create_app(service, settings, AutoTokenizer.from_pretrained(model))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api", timeout=600) as http:
        yield AsyncOpenAI(api_key="none", base_url="http://api/v1", http_client=http, max_retries=0, timeout=600)


async def turn(client: AsyncOpenAI, messages: list[dict[str, Any]], stream: bool, **options: Any) -> Any:
    options = OPTIONS | {"messages": messages, "tools": [openai.pydantic_function_tool(Weather)]} | options
    if not stream:
        return (await client.chat.completions.parse(**options)).choices[0]
    async with client.chat.completions.stream(**options) as events:
        kinds = [event.type async for event in events]
        assert kinds.count("chunk") > 2
        return (await events.get_final_completion()).choices[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_call_its_result_and_an_answer(client: AsyncOpenAI, service: EngineService, stream: bool) -> None:
    """The same tokens with drafts as without."""
    del service.outputs[:]
    for count in (0, 4):
        extra = {"extra_body": {"num_speculative_tokens": count}}
        choice = await turn(client, [ASK], stream, tool_choice="required", parallel_tool_calls=False, **extra)
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.parsed_arguments == Weather(city="Rome", unit="celsius")
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rome is sunny, 31 degrees celsius."}
        messages = [ASK, choice.message.model_dump(), result]
        choice = await turn(client, messages, stream, tool_choice="none", **extra)
        print(choice.message.content)
        assert choice.finish_reason == "stop"
        assert not choice.message.tool_calls
        assert "31" in choice.message.content
    assert service.outputs[:2] == service.outputs[2:]


async def test_an_answer_in_a_format(client: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "Rome is sunny, 31 degrees. Answer in JSON: which city, is it sunny?"}]
    choice = (await client.chat.completions.parse(**OPTIONS, messages=messages, response_format=Answer)).choices[0]
    assert choice.message.parsed == Answer(city="Rome", is_sunny=True)
