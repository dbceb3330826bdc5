"""The assistant's message, as it comes about: content, reasoning, tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.core.types import Finish
from specdec.structured.parsing.calls import AnswerEvent, AnswerParser, ContentDelta, ReasoningDelta, ToolCallDelta

Json = dict[str, Any]


@dataclass(slots=True)
class ToolCall:
    """A call so far.

    Attributes:
        id: By which the client's answer names it.
        arguments: JSON text.
    """

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")


class AssistantMessage:
    """One choice's message, read from its text.

    Args:
        parser: Of this choice alone.

    Attributes:
        calls: Tool calls so far, the last of them perhaps unfinished.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    @property
    def content(self) -> str:
        """What was said so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """What was thought so far."""
        return "".join(self._reasoning)

    def read(self, text: str, finish: Finish | None) -> list[AnswerEvent]:
        """Take more text, and the end where there is one; returns what is new."""
        events = self._parser.push(text) + (self._parser.finish() if finish is not None else [])
        for event in events:
            match event:
                case ContentDelta():
                    self._content.append(event.text)
                case ReasoningDelta():
                    self._reasoning.append(event.text)
                case ToolCallDelta():
                    if event.name is not None:
                        self.calls.append(ToolCall(event.name))
                    self.calls[event.index].arguments += event.arguments
        return events

    def whole(self) -> Json:
        """The message in a chat completion."""
        content = None if self.calls and not self._content else self.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call(call) for call in self.calls]
        return message

    def delta(self, events: Sequence[AnswerEvent]) -> Json:
        """The delta in a chunk of a chat completion."""
        delta: Json = {}
        calls: dict[int, Json] = {}
        for event in events:
            match event:
                case ContentDelta():
                    delta["content"] = delta.get("content", "") + event.text
                case ReasoningDelta():
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
                case ToolCallDelta():
                    if event.index not in calls:
                        calls[event.index] = {"index": event.index, "function": {"arguments": ""}}
                    if event.name is not None:
                        calls[event.index] |= {"id": self.calls[event.index].id, "type": "function"}
                        calls[event.index]["function"] = {"name": event.name, "arguments": ""}
                    calls[event.index]["function"]["arguments"] += event.arguments
        return delta | ({"tool_calls": list(calls.values())} if calls else {})


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
