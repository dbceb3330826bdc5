"""Functions that a response may call, as ``/v1/responses`` writes them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from deployments.http.schemas.fields import Body, kind_of
from deployments.http.schemas.tools import MOST_TOOLS, FunctionName, IsFunction, check_different


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
    taken: ClassVar[frozenset[str]] = frozenset({"output_schema"})

    type: IsFunction
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """The choice of one function."""

    type: IsFunction
    name: FunctionName


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[FunctionChoice, Tag("dict")],
    Discriminator(
        kind_of,
        custom_error_type="choice_type",
        custom_error_message='must be "none", "auto", "required" or {"type": "function", "name": ...}',
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
            Annotated[FunctionTool, Tag("<function>")] | Annotated[dict[str, Any], Tag("<other>")],
            Discriminator(_kind_of_tool),
        ]
    ],
    Field(max_length=MOST_TOOLS, fail_fast=True),
    AfterValidator(_different),
]
