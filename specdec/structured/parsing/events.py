"""What parsers of an answer say, and the one that takes everything for content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
