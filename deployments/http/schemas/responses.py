"""The body of ``POST /v1/responses``.

The items of a conversation, as ``/v1/responses`` writes them.

Functions that a response may call, as ``/v1/responses`` writes them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from deployments.http.schemas.chat import (
    MOST_TOOLS,
    Effort,
    FunctionName,
    IsFunction,
    TemplatedBody,
    check_different,
    kind_of_choice,
)
from deployments.http.schemas.common import SamplingBody
from deployments.http.schemas.fields import (
    IGNORED_IN_RESPONSES,
    MOST_ITEMS,
    REFUSED_IN_RESPONSES,
    REPLACED_IN_RESPONSES,
    Body,
    JsonObject,
    kind_of,
    refusal_as_text,
)
from specdec.core.errors import InvalidParameterError, UnsupportedParameterError

_TEXTS = ("input_text", "output_text")
_MOST_SHOWN = 64
_BY_PROGRAMS: dict[str, tuple[Any, ...]] = {"caller": ({"type": "direct"},), "namespace": ()}
"""Of calls that only OpenAI has; the official client's objects have them as null."""


def _only_text(kind: Any) -> Any:
    if kind not in _TEXTS:
        raise PydanticCustomError(
            "unsupported_parameter", "must be 'input_text' or 'output_text': other parts are not supported"
        )
    return kind


class InputTextPart(Body):
    """A piece of a message; a refusal is one, too."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed"})

    type: Annotated[Any, AfterValidator(_only_text), WithJsonSchema({"enum": list(_TEXTS)})]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, data: Any) -> Any:
        return refusal_as_text(data, "output_text")


InputTextParts = Annotated[list[InputTextPart], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
InputContent = Annotated[
    Annotated[str, Tag("str")] | Annotated[InputTextParts, Tag("list")],
    Discriminator(
        kind_of,
        custom_error_type="content_type",
        custom_error_message='must be a string or a list of parts {"type": "input_text", "text": ...}',
    ),
]


CallId = Annotated[str, Field(max_length=256)]


def text_of(content: str | list[InputTextPart]) -> str:
    """A content as one string."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(Body):
    """What somebody said; the only kind of item that needs no ``type``."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent

    @property
    def text(self) -> str:
        """The content as one string."""
        return text_of(self.content)


class ReasoningPart(Body):
    """A piece of what was thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What the assistant thought before its answer."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "summary", "encrypted_content"})

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MOST_ITEMS, fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        return "".join(part.text for part in self.content or ())


class CallItem(Body):
    """A call of an earlier answer.

    Attributes:
        call_id: By which its result names it.
        arguments: JSON text.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = {**_BY_PROGRAMS, "async": (False,), "async_": (False,)}
    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "parsed_arguments"})

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str

    @property
    def text(self) -> str:
        """The arguments."""
        return self.arguments


class ResultItem(Body):
    """What a call gave."""

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = _BY_PROGRAMS
    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "name"})

    type: Literal["function_call_output"]
    call_id: CallId
    output: InputContent

    @property
    def text(self) -> str:
        """The output as one string."""
        return text_of(self.output)


ITEMS = ("message", "reasoning", "function_call", "function_call_output")


def _known(item: Any) -> Any:
    """Refuse items that are not served, by their type."""
    kind = _kind_of_item(item)
    if kind is not None and kind[1:-1] not in ITEMS:
        details = {"field": "type", "kinds": ", ".join(ITEMS), "kind": kind[1:-1][:_MOST_SHOWN]}
        raise PydanticCustomError("unsupported_parameter", "must be one of {kinds}: {kind} is not supported", details)
    return item


def _kind_of_item(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", "")
    return f"<{kind if isinstance(kind, str) else 'message'}>" if isinstance(item, (dict, Body)) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[ResultItem, Tag("<function_call_output>")],
    Discriminator(_kind_of_item, custom_error_type="item_type", custom_error_message="must be an object"),
    BeforeValidator(_known),
]

InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
Input = Annotated[
    Annotated[str, Tag("str")] | Annotated[InputItems, Tag("list")],
    Discriminator(kind_of, custom_error_type="input_type", custom_error_message="must be a string or a list of items"),
]


class FunctionTool(Body):
    """A function.

    Attributes:
        parameters: JSON schema of its arguments, an object; absent, it takes none.
        strict: Calls have arguments by that schema, under ``tool_choice: auto`` too; by default not.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = {
        "async": (False,),
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"output_schema"})

    type: IsFunction
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """The choice of one function."""

    type: IsFunction
    name: FunctionName


class AllowedFunctions(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(max_length=MOST_TOOLS, fail_fast=True)]


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[FunctionChoice, Tag("dict")]
    | Annotated[AllowedFunctions, Tag("<allowed>")],
    Discriminator(
        kind_of_choice,
        custom_error_type="choice_type",
        custom_error_message='must be "none", "auto", "required", {"type": "function", "name": ...} '
        'or {"type": "allowed_tools", "mode": ..., "tools": [...]}',
    ),
]


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "<other>" if isinstance(kind, str) and kind != "function" else "<function>"


def _different(tools: list[AnyTool]) -> list[AnyTool]:
    check_different(tool.name for tool in tools if isinstance(tool, FunctionTool))
    return tools


AnyTool = FunctionTool | dict[str, Any]
"""A function, or a tool of another kind, as it came: the service is configured to refuse or to drop it."""
ResponsesTools = Annotated[
    list[
        Annotated[
            Annotated[FunctionTool, Tag("<function>")] | Annotated[JsonObject, Tag("<other>")],
            Discriminator(_kind_of_tool),
        ]
    ],
    Field(max_length=MOST_TOOLS, fail_fast=True),
    AfterValidator(_different),
]


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
    json_schema: Annotated[JsonObject | None, Field(alias="schema")] = None
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

    ignored: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


class Reasoning(Body):
    """What is thought before the answer; it is shown as it is, without a summary."""

    ignored: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Effort | None = None


class ResponseStreamOptions(Body):
    """How a stream is sent: in one way, with the usage in its last event."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation", "include_usage"})


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
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_RESPONSES

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
