"""Kinds of values that keys have, and how each is read from YAML, a flag or the environment."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from cluster.config.models import IMPORT_STRING
from specdec.core.validation import MAX_NUM_SPECULATIVE_TOKENS

_ARGUMENT = r"[^\W\d]\w*=[^,]+"
_BACKEND = re.compile(rf"{IMPORT_STRING.pattern}(:{_ARGUMENT}(,{_ARGUMENT})*)?")


def import_strings(value: Any) -> Any:
    """Read a list of import strings; on a command line they are separated by commas.

    Raises:
        ValueError: One is not of the form ``package.module:name``.
    """
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and IMPORT_STRING.fullmatch(name) for name in names
    ):
        raise ValueError("must be a list of import strings of the form 'package.module:name'")
    return tuple(names)


ImportStrings = Annotated[tuple[str, ...], BeforeValidator(import_strings)]


def backend(value: Any) -> Any:
    """Read the import string of a function, and after one more colon maybe its arguments.

    Raises:
        ValueError: It is not of the form ``package.module:name`` or ``package.module:name:argument=value,...``.
    """
    if value is None or (isinstance(value, str) and _BACKEND.fullmatch(value)):
        return value
    raise ValueError("must be 'package.module:name', or with arguments 'package.module:name:argument=value,...'")


Backend = Annotated[str | None, BeforeValidator(backend)]


def switch(value: Any) -> Any:
    """Read ``on`` and ``off``, which YAML takes for true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(switch)]

TOOL_PARSERS = ("auto", "hermes", "llama3", "response_template")


def tool_parser(value: Any) -> str:
    """Read the name of a parser of tool calls, or its import string.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, str) and (value in TOOL_PARSERS or IMPORT_STRING.fullmatch(value)):
        return value
    raise ValueError(f"must be one of {', '.join(TOOL_PARSERS)}, or an import string, 'package.module:name'")


def reasoning_tags(value: Any) -> str:
    """Read the tags around reasoning, with a comma between them, ``auto`` or ``none``.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(value, str):
        begin, comma, end = (part.strip() for part in value.partition(","))
        if value in ("auto", "none") or (begin and comma and end and "," not in end):
            return value
    raise ValueError("must be 'auto', 'none', or two tags with a comma between them, as in '<think>,</think>'")


ToolParser = Annotated[str, BeforeValidator(tool_parser)]
ReasoningTagsSetting = Annotated[str, BeforeValidator(reasoning_tags)]


def draft_length(value: Any) -> Literal["auto"] | int:
    """Read a draft length: ``auto``, or a whole number of tokens.

    Raises:
        ValueError: For anything else.
    """
    if value == "auto":
        return "auto"
    text = str(value).strip()
    if not text.isdecimal() or int(text) > MAX_NUM_SPECULATIVE_TOKENS:
        raise ValueError(
            f"must be 'auto' or a whole number of tokens, at least 0 and at most {MAX_NUM_SPECULATIVE_TOKENS}"
        )
    return int(text)


DraftLength = Annotated[Literal["auto"] | int, BeforeValidator(draft_length)]
