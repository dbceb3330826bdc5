"""The official client, ``openai``."""

from __future__ import annotations

from typing import Any

from asked import KEY, MESSAGES, MOST_TOKENS, NUM_TOKENS, RESULT, TEXT, Order, Weather, tell
from openai import OpenAI, pydantic_function_tool


class Completions:
    """``client.completions``."""

    def __init__(self, base_url: str, model: str) -> None:
        self._create = OpenAI(base_url=base_url, api_key=KEY).completions.create
        self._options: Any = {"model": model, "prompt": TEXT, "temperature": 0, "max_tokens": NUM_TOKENS}

    def text(self) -> str:
        return self._create(**self._options).choices[0].text

    def pieces(self) -> list[str]:
        return [chunk.choices[0].text for chunk in self._create(**self._options, stream=True)]


class Chat:
    """``client.chat.completions``."""

    def __init__(self, base_url: str, model: str) -> None:
        self._chat = OpenAI(base_url=base_url, api_key=KEY).chat.completions
        self._options: Any = {"model": model, "messages": MESSAGES, "temperature": 0}
        self._calling: Any = {"tools": [pydantic_function_tool(Weather)], "tool_choice": "required"}
        self._calling |= {"parallel_tool_calls": False, "max_tokens": MOST_TOKENS}

    def text(self) -> str | None:
        return self._chat.create(**self._options, max_tokens=NUM_TOKENS).choices[0].message.content

    def pieces(self) -> list[str]:
        stream = self._chat.create(**self._options, max_tokens=NUM_TOKENS, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in stream]

    def order(self) -> Order | None:
        answer = self._chat.parse(**self._options, max_tokens=MOST_TOKENS, response_format=Order)
        return answer.choices[0].message.parsed

    def call(self) -> tuple[str, str]:
        (call,) = self._chat.create(**self._options, **self._calling).choices[0].message.tool_calls
        return call.function.name, call.function.arguments

    def streamed_order(self) -> Order | None:
        with self._chat.stream(**self._options, max_tokens=MOST_TOKENS, response_format=Order) as stream:
            return stream.get_final_completion().choices[0].message.parsed

    def streamed_call(self) -> tuple[str, str]:
        with self._chat.stream(**self._options, **self._calling) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        return call.function.name, call.function.arguments

    def loop(self) -> str | None:
        with self._chat.stream(**self._options, **self._calling) as stream:
            message = stream.get_final_completion().choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
        options = self._options | self._calling | {"messages": [*MESSAGES, message, result], "tool_choice": "none"}
        return self._chat.create(**options).choices[0].message.content


class Responses:
    """``client.responses``."""

    def __init__(self, base_url: str, model: str) -> None:
        self._responses = OpenAI(base_url=base_url, api_key=KEY).responses
        self._options: Any = {"model": model, "input": TEXT, "temperature": 0}
        self._calling: Any = {"tools": [pydantic_function_tool(Weather)], "tool_choice": "required"}
        self._calling |= {"parallel_tool_calls": False, "max_output_tokens": MOST_TOKENS}

    def text(self) -> str:
        return self._responses.create(**self._options, max_output_tokens=NUM_TOKENS).output_text

    def pieces(self) -> list[str]:
        stream = self._responses.create(**self._options, max_output_tokens=NUM_TOKENS, stream=True)
        return [event.delta for event in stream if event.type == "response.output_text.delta"]

    def order(self) -> Order | None:
        return self._responses.parse(**self._options, max_output_tokens=MOST_TOKENS, text_format=Order).output_parsed

    def call(self) -> tuple[str, str]:
        (call,) = self._responses.parse(**self._options, **self._calling).output
        return call.name, call.arguments

    def streamed_order(self) -> Order | None:
        with self._responses.stream(**self._options, max_output_tokens=MOST_TOKENS, text_format=Order) as stream:
            return stream.get_final_response().output_parsed

    def streamed_call(self) -> tuple[str, str]:
        with self._responses.stream(**self._options, **self._calling) as stream:
            (call,) = stream.get_final_response().output
        return call.name, call.arguments

    def loop(self) -> str:
        (call,) = self._responses.parse(**self._options, **self._calling).output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        options = self._options | self._calling | {"input": [*MESSAGES, call.model_dump(), result]}
        return self._responses.parse(**options | {"tool_choice": "none"}).output_text


tell(["openai"], Completions, Chat, Responses)
