"""The items of a conversation, as ``/v1/responses`` writes them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.http.schemas.fields import Body, kind_of

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
    """A piece of a message."""

    taken: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed"})

    type: Annotated[Any, AfterValidator(_only_text), WithJsonSchema({"enum": list(_TEXTS)})]
    text: str


InputContent = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[InputTextPart], Field(min_length=1, fail_fast=True), Tag("list")],
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

    taken: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

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

    taken: ClassVar[frozenset[str]] = frozenset({"id", "status", "summary", "encrypted_content"})

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None

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
    taken: ClassVar[frozenset[str]] = frozenset({"id", "status", "parsed_arguments"})

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
    taken: ClassVar[frozenset[str]] = frozenset({"id", "status", "name"})

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
        told = {"field": "type", "kinds": ", ".join(ITEMS), "kind": kind[1:-1][:_MOST_SHOWN]}
        raise PydanticCustomError("unsupported_parameter", "must be one of {kinds}: {kind} is not supported", told)
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

Input = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("list")],
    Discriminator(kind_of, custom_error_type="input_type", custom_error_message="must be a string or a list of items"),
]
