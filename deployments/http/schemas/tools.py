"""Tools that a conversation may call, and calls of them in its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.http.schemas.fields import Body, kind_of

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
    parameters: dict[str, Any] | None = None
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


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedChoice, Tag("dict")],
    Discriminator(
        kind_of,
        custom_error_type="choice_type",
        custom_error_message='must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
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

    taken: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class CallSpec(Body):
    """A call of an earlier answer."""

    taken: ClassVar[frozenset[str]] = frozenset({"index"})

    id: Annotated[str, Field(max_length=256)]
    type: IsFunction
    function: CalledFunction


Calls = Annotated[list[CallSpec], Field(max_length=MOST_CALLS, fail_fast=True)]
