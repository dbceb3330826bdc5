"""One tool call, as most templates write it: a JSON object with a name and an object of arguments.

What parsers of an answer say, and the one that takes everything for content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a tool call.

    Attributes:
        index: Of the call in its answer, from 0.
        name: The function's, in a call's first piece; None in later ones.
        arguments: More of the JSON text of its arguments; may be empty in the first piece.
    """

    index: int
    name: str | None
    arguments: str


AnswerEvent = ContentDelta | ReasoningDelta | ToolCallDelta


class AnswerParser(Protocol):
    """Reads one answer, in pieces. What is told does not depend on where the pieces are cut, but for its own cuts."""

    def push(self, text: str) -> list[AnswerEvent]:
        """Take more text; what may yet be part of a tag is held back."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """The text has ended: what was held back."""
        ...


class PlainParser:
    """Takes everything for content."""

    def push(self, text: str) -> list[AnswerEvent]:
        """The text itself."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[AnswerEvent]:
        """Nothing was held back."""
        return []


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<>]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_END = re.compile(r"\s*\}\s*")


class CallReader:
    """Reads one call from its first character on, and tells of its arguments as they come.

    A call that is written otherwise, its keys the other way round say, is found by :func:`whole_call` at its end.

    Args:
        index: Of the call in its answer.

    Attributes:
        begun: Whether the call's name was told of.
        held: What was read and not yet told of.
        has_ended: Whether its arguments are whole; ``held`` follows them.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._object = _ObjectScanner()
        self.begun = False
        self.has_ended = False
        self.held = ""

    def push(self, text: str) -> list[ToolCallDelta]:
        """Take more text."""
        self.held += text
        events: list[ToolCallDelta] = []
        if not self.begun:
            head = _HEAD.match(self.held)
            if head is None:
                return []
            self.begun, self.held = True, self.held[head.end() :]
            events.append(ToolCallDelta(self._index, head[1], ""))
        if not self.has_ended:
            length = self._object.push(self.held)
            self.has_ended = self._object.has_ended
            if length:
                events.append(ToolCallDelta(self._index, None, self.held[:length]))
            self.held = self.held[length:]
        return events

    def after_brace(self) -> str | None:
        """Of a call that has ended: what follows the brace that closes it; None while that is still to come."""
        match = _END.match(self.held)
        if match is not None:
            return self.held[match.end() :]
        return self.held if self.held.strip() else None


def whole_call(text: str, index: int) -> list[ToolCallDelta]:
    """The call that a text is; empty where it is none."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return []
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return []
    return [parsed_call(index, call["name"], arguments)]


def parsed_call(index: int, name: str, arguments: Any) -> ToolCallDelta:
    """A whole call from what a parser made of it: half surrogate pairs, which have no UTF-8 form, are escapes again.

    Args:
        index: Of the call in its answer.
        name: The function's.
        arguments: JSON text, or what is to be written so.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCallDelta(index, *(part.encode(errors="backslashreplace").decode() for part in (name, text)))


def unfinished(text: str, tag: str) -> int:
    """How many characters at a text's end may be the beginning of a tag."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


class _ObjectScanner:
    """Finds the end of a JSON object by its braces, brackets and strings.

    Attributes:
        has_ended: Whether the object is whole.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> int:
        """Read on; how many of the characters belong to the object."""
        for place, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = not self._is_escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.has_ended = True
                    return place + 1
        return len(text)
