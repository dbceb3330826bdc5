"""``instructor``: the official client, and answers that are objects."""

from __future__ import annotations

from typing import Any

import instructor
from asked import KEY, MESSAGES, MOST_TOKENS, NUM_TOKENS, Order, Weather, tell
from openai import OpenAI
from pydantic import model_validator


class JsonSchema:
    """An object by ``response_format``."""

    mode = instructor.Mode.JSON_SCHEMA

    def __init__(self, base_url: str, model: str) -> None:
        self._completions = instructor.from_openai(
            OpenAI(base_url=base_url, api_key=KEY), mode=self.mode
        ).chat.completions
        self._options: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_retries": 0}

    def order(self) -> Order:
        return self._completions.create(**self._options, max_tokens=MOST_TOKENS, response_model=Order)

    def streamed_order(self) -> Order:
        *_, last = self._completions.create_partial(**self._options, max_tokens=MOST_TOKENS, response_model=Order)
        return Order.model_validate(last.model_dump())

    def retry(self) -> int:
        """The answer is found invalid, and sent back with what is wrong."""
        seen = []

        class Refused(Order):
            @model_validator(mode="after")
            def _is_the_second(self) -> Refused:
                seen.append(self)
                if len(seen) == 1:
                    raise ValueError("ask once more")
                return self

        options = self._options | {"max_retries": 1, "max_tokens": MOST_TOKENS}
        self._completions.create(**options, response_model=Refused)
        return len(seen)


class Tools(JsonSchema):
    """Its default mode: an object by a call of a named function."""

    mode = instructor.Mode.TOOLS

    def text(self) -> str | None:
        answer = self._completions.create(**self._options, max_tokens=NUM_TOKENS, response_model=None)
        return answer.choices[0].message.content

    def pieces(self) -> list[str]:
        stream = self._completions.create(**self._options, max_tokens=NUM_TOKENS, stream=True, response_model=None)
        return [chunk.choices[0].delta.content or "" for chunk in stream]

    def call(self) -> tuple[str, str]:
        _weather, answer = self._completions.create_with_completion(
            **self._options, max_tokens=MOST_TOKENS, response_model=Weather
        )
        (call,) = answer.choices[0].message.tool_calls
        return call.function.name, call.function.arguments


class Responses(JsonSchema):
    """An object by a call of a named function, over ``/v1/responses``."""

    mode = instructor.Mode.RESPONSES_TOOLS


tell(["instructor", "openai"], Tools, JsonSchema, Responses)
