"""``litellm``, as a library: the model is one of an OpenAI-compatible service."""

from __future__ import annotations

from typing import Any

import litellm
from asked import KEY, MESSAGES, MOST_TOKENS, NUM_TOKENS, RESULT, TEXT, Order, Weather, tell

FUNCTION = {"name": "Weather", "parameters": Weather.model_json_schema()}


class Completions:
    """``litellm.text_completion``."""

    def __init__(self, base_url: str, model: str) -> None:
        self._options: Any = {"model": f"text-completion-openai/{model}", "api_base": base_url, "api_key": KEY}
        self._options |= {"prompt": TEXT, "temperature": 0, "max_tokens": NUM_TOKENS}

    def text(self) -> str:
        return litellm.text_completion(**self._options).choices[0].text

    def pieces(self) -> list[str]:
        return [chunk.choices[0].text or "" for chunk in litellm.text_completion(**self._options, stream=True)]


class Chat:
    """``litellm.completion``."""

    def __init__(self, base_url: str, model: str) -> None:
        self._options: Any = {"model": f"openai/{model}", "api_base": base_url, "api_key": KEY}
        self._options |= {"messages": MESSAGES, "temperature": 0}
        self._calling: Any = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
        self._calling |= {"parallel_tool_calls": False, "max_tokens": MOST_TOKENS}

    def text(self) -> str:
        return litellm.completion(**self._options, max_tokens=NUM_TOKENS).choices[0].message.content

    def pieces(self) -> list[str]:
        return [chunk.choices[0].delta.content or "" for chunk in self._stream(max_tokens=NUM_TOKENS)]

    def order(self) -> Order:
        answer = litellm.completion(**self._options, max_tokens=MOST_TOKENS, response_format=Order)
        return Order.model_validate_json(answer.choices[0].message.content)

    def call(self) -> tuple[str, str]:
        (call,) = litellm.completion(**self._options, **self._calling).choices[0].message.tool_calls
        return call.function.name, call.function.arguments

    def streamed_call(self) -> tuple[str, str]:
        (call,) = litellm.stream_chunk_builder(self._stream(**self._calling)).choices[0].message.tool_calls
        return call.function.name, call.function.arguments

    def loop(self) -> str:
        message = litellm.completion(**self._options, **self._calling).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
        options = self._options | self._calling | {"messages": [*MESSAGES, message, result], "tool_choice": "none"}
        return litellm.completion(**options).choices[0].message.content

    def _stream(self, **options: Any) -> list[Any]:
        return list(litellm.completion(**self._options, **options, stream=True))


class Responses:
    """``litellm.responses``."""

    def __init__(self, base_url: str, model: str) -> None:
        self._options: Any = {"model": f"openai/{model}", "api_base": base_url, "api_key": KEY}
        self._options |= {"input": TEXT, "temperature": 0}
        self._calling: Any = {"tools": [{"type": "function"} | FUNCTION], "tool_choice": "required"}
        self._calling |= {"parallel_tool_calls": False, "max_output_tokens": MOST_TOKENS}

    def text(self) -> str:
        return litellm.responses(**self._options, max_output_tokens=NUM_TOKENS).output_text

    def pieces(self) -> list[str]:
        stream = litellm.responses(**self._options, max_output_tokens=NUM_TOKENS, stream=True)
        return [event.delta for event in stream if event.type == "response.output_text.delta"]

    def order(self) -> Order:
        answer = litellm.responses(**self._options, max_output_tokens=MOST_TOKENS, text_format=Order)
        return Order.model_validate_json(answer.output_text)

    def call(self) -> tuple[str, str]:
        (call,) = litellm.responses(**self._options, **self._calling).output
        return call.name, call.arguments

    def loop(self) -> str:
        (call,) = litellm.responses(**self._options, **self._calling).output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        options = self._options | {"input": [*MESSAGES, call.model_dump(), result]}
        return litellm.responses(**options, **self._calling | {"tool_choice": "none"}).output_text


tell(["litellm", "openai"], Completions, Chat, Responses)
