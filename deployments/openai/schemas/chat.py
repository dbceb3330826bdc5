"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.openai.schemas.common import GenerationBody
from deployments.openai.schemas.fields import Body, refused
from specdec.errors import InvalidParameterError


def _text(value: Any) -> str:
    """A message's content, a string or a list of text parts, as one string."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_part(part) for part in value):
        for part in value:
            if part["type"] != "text":
                raise PydanticCustomError(
                    "unsupported_parameter", "is not supported with a part of type {kind}", {"kind": part["type"]}
                )
        return "\n".join(part["text"] for part in value)
    raise PydanticCustomError("content_type", 'must be a string or a list of parts {"type": "text", "text": ...}')


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return False
    return part["type"] != "text" or (part.keys() == {"type", "text"} and isinstance(part["text"], str))


_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
Content = Annotated[
    Any,
    AfterValidator(_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]}),
]


class ChatMessage(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    refusal: Annotated[Any, refused()] = None
    audio: Annotated[Any, refused()] = None
    tool_calls: Annotated[Any, refused()] = None
    tool_call_id: Annotated[Any, refused()] = None
    function_call: Annotated[Any, refused()] = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ChatBody(GenerationBody):
    """A conversation to go on with.

    Attributes:
        messages: The turns so far.
        max_completion_tokens: Newer name of ``max_tokens``.
        logprobs: Whether to report log probabilities.
        top_logprobs: Alternatives to report per token.
        chat_template: Jinja template in place of the model's, where the service trusts requests with that.
        chat_template_kwargs: Variables for the template.
    """

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    parallel_tool_calls: bool | None = None
    tools: Annotated[Any, refused()] = None
    tool_choice: Annotated[Any, refused("none")] = None
    functions: Annotated[Any, refused()] = None
    function_call: Annotated[Any, refused("none")] = None
    response_format: Annotated[Any, refused({"type": "text"})] = None
    modalities: Annotated[Any, refused(["text"])] = None
    audio: Annotated[Any, refused()] = None
    prediction: Annotated[Any, refused()] = None
    reasoning_effort: Annotated[Any, refused()] = None
    verbosity: Annotated[Any, refused()] = None
    web_search_options: Annotated[Any, refused()] = None

    def check_together(self) -> None:
        """Refuse two limits, and alternatives of nothing."""
        super().check_together()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidParameterError("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs", "top_logprobs needs logprobs to be true")

    @property
    def output_limit(self) -> int | None:
        """Most output tokens, if the request says."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_name(self) -> str:
        """What the request calls that."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def prompt_name(self) -> str:
        """What the request calls its prompt."""
        return "messages"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def logprobs_name(self) -> str:
        """What the request calls that."""
        return "top_logprobs"
