"""The bodies of ``POST /v1/completions`` and ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from deployments.http.schemas.common import GenerationBody
from deployments.http.schemas.fields import (
    IGNORED,
    IGNORED_IN_COMPLETIONS,
    IGNORED_IN_MESSAGES,
    MOST_ITEMS,
    REFUSED,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
    Body,
    JsonObject,
    Prompts,
    kind_of,
    refusal_as_text,
)
from specdec.core.errors import InvalidParameterError

MOST_TOOLS = 128
MOST_CALLS = 128
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
FunctionName = Annotated[str, Field(pattern=_NAME)]


def _only_function(kind: Any) -> Any:
    if kind != "function":
        shown = {"kind": repr(kind)[:64]}
        raise PydanticCustomError("unsupported_parameter", "must be 'function': {kind} is not supported", shown)
    return kind


IsFunction = Annotated[Any, AfterValidator(_only_function), WithJsonSchema({"const": "function"})]


class FunctionSpec(Body):
    """What can be called.

    Attributes:
        parameters: JSON schema of its arguments, an object; absent, it takes none.
        strict: Calls have arguments by that schema, under ``tool_choice: auto`` too.
    """

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolSpec(Body):
    """A tool."""

    type: IsFunction
    function: FunctionSpec


class ChosenFunction(Body):
    """The name of the function that must be called."""

    name: FunctionName


class NamedChoice(Body):
    """The choice of one function."""

    type: IsFunction
    function: ChosenFunction


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(max_length=MOST_TOOLS, fail_fast=True)]


class AllowedChoice(Body):
    """A choice among some of the tools: the prompt tells of all, so that it stays the same from turn to turn."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(choice: Any) -> str | None:
    """The kind of a choice among tools: by its name, of one function, or ``<allowed>``; None for all else."""
    is_allowed = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    return "<allowed>" if is_allowed else kind_of(choice)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[NamedChoice, Tag("dict")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    Discriminator(
        kind_of_choice,
        custom_error_type="choice_type",
        custom_error_message='must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    ),
]


def check_different(names: Iterable[str]) -> None:
    """Refuse two tools of one name.

    Raises:
        PydanticCustomError: There are two; it tells the name.
    """
    name = next((name for name, count in Counter(names).items() if count > 1), None)
    if name is not None:
        raise PydanticCustomError("same_name", "two tools have the name {name}", {"name": repr(name)})


def _different(tools: list[ToolSpec]) -> list[ToolSpec]:
    check_different(tool.function.name for tool in tools)
    return tools


Tools = Annotated[list[ToolSpec], Field(max_length=MOST_TOOLS, fail_fast=True), AfterValidator(_different)]


class CalledFunction(Body):
    """A function and the JSON text of its arguments."""

    ignored: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class CallSpec(Body):
    """A call of an earlier answer."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: Annotated[str, Field(max_length=256)]
    type: IsFunction
    function: CalledFunction


Calls = Annotated[list[CallSpec], Field(max_length=MOST_CALLS, fail_fast=True)]


def _only_text(kind: Any) -> Any:
    if kind != "text":
        raise PydanticCustomError("unsupported_parameter", "must be 'text': other parts are not supported")
    return kind


class TextPart(Body):
    """A piece of a message's content; a refusal is one, too."""

    type: Annotated[Any, AfterValidator(_only_text), WithJsonSchema({"const": "text"})]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, data: Any) -> Any:
        return refusal_as_text(data, "text")


TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
MessageContent = Annotated[
    Annotated[str, Tag("str")] | Annotated[TextParts, Tag("list")],
    Discriminator(
        kind_of,
        custom_error_type="content_type",
        custom_error_message='must be a string or a list of parts {"type": "text", "text": ...}',
    ),
]


class ChatMessage(Body):
    """One turn.

    Attributes:
        tool_calls: What the assistant called.
        tool_call_id: Of the call that a tool's message answers.
        reasoning: What the assistant thought, for templates that show it again.
        reasoning_content: Another name of ``reasoning``.
        refusal: What an assistant said in place of an answer.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED_IN_MESSAGES
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    name: str | None = None
    tool_calls: Calls | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """Refuse what another role says, and a turn that says nothing."""
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError(
                "of_assistant", "only messages of the assistant have tool_calls", {"field": "tool_calls"}
            )
        if self.refusal and self.role != "assistant":
            raise PydanticCustomError(
                "of_assistant", "only messages of the assistant have a refusal", {"field": "refusal"}
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("no_call_id", "a message of a tool has a tool_call_id", {"field": "tool_call_id"})
        if self.role != "tool" and self.tool_call_id is not None:
            raise PydanticCustomError(
                "of_tool", "only messages of a tool have a tool_call_id", {"field": "tool_call_id"}
            )
        if self.content is None and self.role != "assistant":  # an assistant that says nothing sends null
            raise PydanticCustomError("no_content", "a message of this role has content", {"field": "content"})
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise PydanticCustomError(
                "two_reasonings", "reasoning and reasoning_content differ; send one of them", {"field": "reasoning"}
            )
        return self

    @property
    def thought(self) -> str | None:
        """The reasoning by either of its names."""
        return self.reasoning or self.reasoning_content

    @property
    def text(self) -> str:
        """The content as one string, and after it the refusal: a template knows it as what the assistant said."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or ()]
        text = "\n".join(parts)
        return f"{text}\n{self.refusal}" if text and self.refusal else text or self.refusal or ""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ChatMessages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]


class TemplatedBody(Body):
    """How a conversation is made into a prompt.

    Attributes:
        chat_template: Jinja template in place of the model's, where the service trusts requests with that.
        chat_template_kwargs: Variables for the template.
        add_generation_prompt: End with what an answer begins with; by default, unless the last message is gone on with.
        continue_final_message: Go on with the last message instead of answering it.
        add_special_tokens: Add those that the tokenizer puts around a text.
    """

    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None

    def check_template(self) -> None:
        """Refuse two ends of one prompt.

        Raises:
            InvalidParameterError: The last message is to be both gone on with and answered.
        """
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidParameterError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )


class ConversationBody(TemplatedBody):
    """What a conversation's prompt is made of, beside its messages.

    Attributes:
        tools: What may be called.
        reasoning_effort: A variable of the template; ``none`` also switches thinking off where the template can. It has
            no effect where the template does not know it.
    """

    tools: Tools | None = None
    reasoning_effort: Effort | None = None

    @property
    def shown_tools(self) -> list[ToolSpec]:
        """The tools that the prompt tells of."""
        return self.tools or []


class Prediction(Body):
    """What the answer is expected to be like: a file that is to be edited, say."""

    type: Literal["content"]
    content: MessageContent

    @property
    def text(self) -> str:
        """The content as one string: its parts one after the other."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(ConversationBody, GenerationBody):
    """A conversation to go on with.

    Attributes:
        messages: The turns so far.
        max_completion_tokens: Newer name of ``max_tokens``.
        logprobs: Whether to report log probabilities.
        top_logprobs: Alternatives to report per token.
        tool_choice: Whether something is called; by default the model chooses where there are tools.
        parallel_tool_calls: Whether an answer may hold several calls; by default it may.
        thinking_token_budget: Most tokens of reasoning; then it ends, and the answer begins.
        include_reasoning: False leaves the reasoning out of the answer.
        prediction: A text to draft from; it changes no token.
    """

    messages: ChatMessages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    include_reasoning: bool | None = None
    prediction: Prediction | None = None

    def check_together(self) -> None:
        """Refuse two limits, and alternatives of nothing."""
        super().check_together()
        self.check_template()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidParameterError("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs", "top_logprobs needs logprobs to be true")
        self.check_tools()

    def check_tools(self) -> None:
        """Refuse a choice among tools that are not there.

        Raises:
            InvalidParameterError: It names the field.
        """
        if not self.tools and self.tool_choice not in (None, "none"):
            raise InvalidParameterError("tool_choice", "tool_choice needs tools")
        names = {tool.function.name for tool in self.tools or ()}
        other = next((name for name in self._chosen_names or () if name not in names), None)
        if other is not None:
            raise InvalidParameterError("tool_choice", f"tool_choice names {other!r}, which is none of the tools")
        is_required = isinstance(self.tool_choice, AllowedChoice) and self.tool_choice.allowed_tools.mode == "required"
        if is_required and not self.callable_tools:
            raise InvalidParameterError("tool_choice", "tool_choice requires a call, and allows none of the tools")

    @property
    def _chosen_names(self) -> list[str] | None:
        """The functions that ``tool_choice`` names, if it names some."""
        match self.tool_choice:
            case NamedChoice() as choice:
                return [choice.function.name]
            case AllowedChoice() as choice:
                return [tool.function.name for tool in choice.allowed_tools.tools]
        return None

    @property
    def callable_tools(self) -> list[ToolSpec]:
        """The tools that the answer may call."""
        names = [] if self.tool_choice == "none" else self._chosen_names
        return [tool for tool in self.tools or () if names is None or tool.function.name in names]

    @property
    def choice(self) -> Literal["none", "auto", "required", "named"]:
        """What is chosen of the tools that may be called."""
        match self.tool_choice:
            case NamedChoice():
                return "named"
            case AllowedChoice() as choice:
                return choice.allowed_tools.mode if self.callable_tools else "none"
            case choice:
                return (choice or "auto") if self.tools else "none"

    @property
    def shown_tools(self) -> list[ToolSpec]:
        """The tools that the prompt tells of: none under ``tool_choice: none``."""
        return [] if self.tool_choice == "none" else self.tools or []

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


class CompletionBody(GenerationBody):
    """A text to go on with.

    Attributes:
        prompt: Text, token ids, or a list of either.
        echo: Begin the answer with the prompt.
        logprobs: Alternatives to report per token; with ``echo`` per token of the prompt too.
        max_tokens: Most output tokens; 0, which takes ``echo``, only scores the prompt.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED | REFUSED_IN_COMPLETIONS
    ignored: ClassVar[frozenset[str]] = IGNORED | IGNORED_IN_COMPLETIONS

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    def check_together(self) -> None:
        """Refuse to answer with nothing."""
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidParameterError("max_tokens", "max_tokens must be at least 1; 0 is for echo alone")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None reports nothing."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token that the answer needs; None needs nothing."""
        needed = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in needed if count is not None), default=None)

    @property
    def echoes_logprobs(self) -> bool:
        """Whether ``logprobs`` begins with those of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def shows_output(self) -> bool:
        """Whether the answer has output; else it only tells of its prompt."""
        return self.max_tokens != 0
