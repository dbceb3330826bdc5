"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.http.schemas.chat import Effort, TemplatedBody
from deployments.http.schemas.common import SamplingBody
from deployments.http.schemas.fields import Body
from deployments.http.schemas.others import REFUSED_IN_RESPONSES, REPLACED_IN_RESPONSES, TAKEN_IN_RESPONSES
from deployments.http.schemas.responses_input import Input
from deployments.http.schemas.responses_tools import FunctionTool, ResponsesToolChoice, ResponsesTools
from specdec.core.errors import InvalidParameterError, UnsupportedParameterError

LOGPROBS = "message.output_text.logprobs"
"""What ``include`` says to have log probabilities."""
_MOST_METADATA = 16
_ITEM_CHARACTERS = 16
"""About as many are read in the time that an empty item takes."""

Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=_MOST_METADATA)
]


class TextFormat(Body):
    """What the text must be.

    Attributes:
        type: Any text, any JSON object, or one that a schema describes.
        name: Of the schema.
        json_schema: The schema; its name in a request is ``schema``.
        strict: Changes nothing: a schema is always kept to.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        if self.type == "json_schema":
            for name, value in (("name", self.name), ("schema", self.json_schema)):
                if value is None:
                    raise PydanticCustomError("needed", "is needed with type 'json_schema'", {"field": name})
        return self


class TextConfig(Body):
    """How the text is written."""

    taken: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


class Reasoning(Body):
    """What is thought before the answer; it is shown as it is, without a summary."""

    taken: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Effort | None = None


class ResponseStreamOptions(Body):
    """How a stream is sent: in one way, with the usage in its last event."""

    taken: ClassVar[frozenset[str]] = frozenset({"include_obfuscation", "include_usage"})


class ResponsesBody(TemplatedBody, SamplingBody):
    """A conversation to go on with, in the words of ``/v1/responses``.

    Attributes:
        store: Keep the response for later; absent, it is kept where the service has a store.
        previous_response_id: Of a response that was kept, and whose conversation goes on.
        input: What the user says, or the items of the conversation so far.
        instructions: A system message that stands before it.
        max_output_tokens: Most output tokens.
        top_logprobs: Alternatives to report per token, where ``include`` asks for log probabilities.
        include: What else the answer shall have.
        metadata: Is sent back.
        text: What the text must be.
        reasoning: How much is thought before the answer.
        thinking_token_budget: Most tokens of that.
        include_reasoning: False leaves it out of the answer.
        tools: What may be called.
        tool_choice: Whether something is called; by default the model chooses where there are tools.
        parallel_tool_calls: Whether an answer may hold several calls; by default it may.
        truncation: ``disabled``: what is too long is refused; ``auto``: the oldest turns are left out until it fits.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED_IN_RESPONSES
    replaced: ClassVar[dict[str, str]] = REPLACED_IN_RESPONSES
    taken: ClassVar[frozenset[str]] = TAKEN_IN_RESPONSES

    input: Input
    store: bool | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    include: Annotated[list[Included], Field(max_length=32, fail_fast=True)] | None = None
    metadata: Metadata | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    include_reasoning: bool | None = None
    tools: ResponsesTools | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    stream_options: ResponseStreamOptions | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are reported."""
        return LOGPROBS in (self.include or ())

    @property
    def num_characters(self) -> int:
        """About how long the conversation is."""
        if isinstance(self.input, str):
            return len(self.input)
        return sum(_ITEM_CHARACTERS + len(item.text) for item in self.input)

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that are functions."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    def other_tools(self) -> list[tuple[str, str]]:
        """The tools that are none: where each is, and its kind."""
        kinds = enumerate(None if isinstance(tool, FunctionTool) else str(tool["type"]) for tool in self.tools or ())
        return [(f"tools[{index}]", kind) for index, kind in kinds if kind is not None]

    def check_together(self, *, has_store: bool) -> None:
        """Check what concerns several fields, or depends on the service.

        Args:
            has_store: Whether the service keeps responses.

        Raises:
            InvalidParameterError: Two fields contradict each other.
            UnsupportedParameterError: One needs a store.
        """
        for name in ("store", "previous_response_id"):
            if not has_store and getattr(self, name):
                raise UnsupportedParameterError(
                    name, f"{name} is not supported: this service keeps no responses (responses_store.enabled)"
                )
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidParameterError("top_logprobs", f'top_logprobs needs "{LOGPROBS}" in include')
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options", "stream_options needs stream to be true")
