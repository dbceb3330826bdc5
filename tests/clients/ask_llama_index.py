"""``llama-index-llms-openai-like``."""

from __future__ import annotations

import json
from typing import Any

from asked import KEY, MOST_TOKENS, NUM_TOKENS, RESULT, TEXT, Order, Weather, tell
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

SAID = [ChatMessage(role="user", content=TEXT)]
TOOL = FunctionTool.from_defaults(
    fn=lambda **arguments: str(arguments), name="Weather", description="The weather.", fn_schema=Weather
)


class Completions:
    """``OpenAILike.complete``."""

    def __init__(self, base_url: str, model: str) -> None:
        options: Any = {
            "model": model,
            "api_base": base_url,
            "api_key": KEY,
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
        }
        self._llm = OpenAILike(**options, context_window=1024)

    def text(self) -> str:
        return self._llm.complete(TEXT).text

    def pieces(self) -> list[str]:
        return [one.delta or "" for one in self._llm.stream_complete(TEXT)]


class Chat:
    """``OpenAILike.chat``."""

    def __init__(self, base_url: str, model: str) -> None:
        options: Any = {"model": model, "api_base": base_url, "api_key": KEY, "temperature": 0, "context_window": 1024}
        options |= {"is_chat_model": True, "is_function_calling_model": True}
        self._llm = OpenAILike(**options, max_tokens=NUM_TOKENS)
        self._writer = OpenAILike(**options, max_tokens=MOST_TOKENS)

    def text(self) -> str | None:
        return self._llm.chat(SAID).message.content

    def pieces(self) -> list[str]:
        return [one.delta or "" for one in self._llm.stream_chat(SAID)]

    def order(self) -> Order:
        return self._writer.structured_predict(Order, PromptTemplate(TEXT))

    def call(self) -> tuple[str, str]:
        answer = self._writer.chat_with_tools([TOOL], chat_history=list(SAID), tool_required=True)
        (call,) = self._writer.get_tool_calls_from_response(answer)
        return call.tool_name, json.dumps(call.tool_kwargs)

    def streamed_call(self) -> tuple[str, str]:
        *_, answer = self._writer.stream_chat_with_tools([TOOL], chat_history=list(SAID), tool_required=True)
        (call,) = self._writer.get_tool_calls_from_response(answer)
        return call.tool_name, json.dumps(call.tool_kwargs)

    def loop(self) -> str | None:
        answer = self._writer.chat_with_tools([TOOL], chat_history=list(SAID), tool_required=True)
        (call,) = self._writer.get_tool_calls_from_response(answer)
        result = ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id})
        said = [*SAID, answer.message, result]
        return self._writer.chat_with_tools([TOOL], chat_history=said, tool_choice="none").message.content


class JsonSchema:
    """``OpenAILike`` with ``should_use_structured_outputs``: by ``response_format`` in place of a tool."""

    def __init__(self, base_url: str, model: str) -> None:
        options: Any = {"model": model, "api_base": base_url, "api_key": KEY, "temperature": 0, "context_window": 1024}
        options |= {"is_chat_model": True, "should_use_structured_outputs": True}
        self._writer = OpenAILike(**options, max_tokens=MOST_TOKENS)

    def order(self) -> Order:
        return self._writer.structured_predict(Order, PromptTemplate(TEXT))


class Responses:
    """``OpenAILikeResponses``."""

    def __init__(self, base_url: str, model: str) -> None:
        options: Any = {"model": model, "api_base": base_url, "api_key": KEY, "temperature": 0, "context_window": 1024}
        self._llm = OpenAILikeResponses(**options, max_output_tokens=NUM_TOKENS)
        options |= {"is_function_calling_model": True}
        self._writer = OpenAILikeResponses(**options, max_output_tokens=MOST_TOKENS)

    def text(self) -> str | None:
        return self._llm.chat(SAID).message.content

    def pieces(self) -> list[str]:
        return [one.delta or "" for one in self._llm.stream_chat(SAID)]

    def order(self) -> Order:
        return self._writer.structured_predict(Order, PromptTemplate(TEXT))

    def call(self) -> tuple[str, str]:
        answer = self._writer.chat_with_tools([TOOL], chat_history=list(SAID), tool_required=True)
        (call,) = self._writer.get_tool_calls_from_response(answer)
        return call.tool_name, json.dumps(call.tool_kwargs)

    def loop(self) -> str | None:
        answer = self._writer.chat_with_tools([TOOL], chat_history=list(SAID), tool_required=True)
        (call,) = self._writer.get_tool_calls_from_response(answer)
        result = ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id})
        said = [*SAID, answer.message, result]
        return self._writer.chat_with_tools([TOOL], chat_history=said, tool_choice="none").message.content


tell(["llama-index-llms-openai-like", "llama-index-llms-openai", "openai"], Completions, Chat, JsonSchema, Responses)
