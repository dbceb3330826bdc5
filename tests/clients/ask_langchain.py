"""``langchain-openai``: ``OpenAI`` for completions; ``ChatOpenAI``, over either API."""

from __future__ import annotations

import json
from typing import Any

from asked import KEY, MOST_TOKENS, NUM_TOKENS, RESULT, TEXT, Order, Weather, tell
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI


class Completions:
    """``OpenAI``."""

    def __init__(self, base_url: str, model: str) -> None:
        options: Any = {"model": model, "base_url": base_url, "api_key": KEY, "temperature": 0}
        self._llm = OpenAI(**options, max_tokens=NUM_TOKENS)

    def text(self) -> str:
        return self._llm.invoke(TEXT)

    def pieces(self) -> list[str]:
        return list(self._llm.stream(TEXT))


class NamedTool:
    """``with_structured_output`` by a call of a named function."""

    method: Any = "function_calling"
    uses_responses = False

    def __init__(self, base_url: str, model: str) -> None:
        options: Any = {"model": model, "base_url": base_url, "api_key": KEY, "temperature": 0}
        options |= {"use_responses_api": self.uses_responses}
        self._llm = ChatOpenAI(**options, max_tokens=NUM_TOKENS)
        writer = ChatOpenAI(**options, max_tokens=MOST_TOKENS)
        self._writer = writer.with_structured_output(Order, method=self.method)
        self._caller = writer.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)

    def order(self) -> Any:
        return self._writer.invoke(TEXT)

    def streamed_order(self) -> Any:
        *_, last = self._writer.stream(TEXT)
        return last


class Chat(NamedTool):
    """``ChatOpenAI``; an object by ``response_format``."""

    method = "json_schema"

    def text(self) -> str:
        return self._llm.invoke(TEXT).text

    def pieces(self) -> list[str]:
        return [chunk.text for chunk in self._llm.stream(TEXT)]

    def call(self) -> tuple[str, str]:
        (call,) = self._caller.invoke(TEXT).tool_calls
        return call["name"], json.dumps(call["args"])

    def streamed_call(self) -> tuple[str, str]:
        whole, *rest = self._caller.stream(TEXT)
        for chunk in rest:
            whole += chunk
        (call,) = whole.tool_calls
        return call["name"], json.dumps(call["args"])

    def loop(self) -> str:
        answer = self._caller.invoke(TEXT)
        result = ToolMessage(RESULT, tool_call_id=answer.tool_calls[0]["id"])
        return self._caller.bind(tool_choice="none").invoke([HumanMessage(TEXT), answer, result]).text


class Responses(Chat):
    """``ChatOpenAI(use_responses_api=True)``."""

    uses_responses = True


tell(["langchain-openai", "langchain-core", "openai"], Completions, Chat, NamedTool, Responses)
