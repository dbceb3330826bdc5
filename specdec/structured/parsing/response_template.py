"""Answers read by a tokenizer's own response template, through transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.structured.parsing.calls import AnswerEvent, ContentDelta, ReasoningDelta, ToolCallDelta, parsed_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REASONING = ("thinking", "reasoning", "reasoning_content")


def tells_reasoning(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer's response template has a part for reasoning."""
    template: Any = getattr(tokenizer, "response_template", None) or {}
    return any(name in template.get("fields", {}) for name in _REASONING)


class ResponseTemplateParser:
    """Reads content, reasoning and tool calls by the ``response_template`` of a tokenizer.

    Content and reasoning come as they are read; a call, whose form only the template knows, when it is whole. What the
    template cannot read is content, and so is all that follows it.

    Args:
        tokenizer: With a response template.
        prompt: The text of the prompt, which may have begun a part of the answer.
        tools: As the chat template had them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parser = tokenizer.get_response_parser(prefix=prompt, tools=[dict(tool) for tool in tools])
        self._pending = ""
        self._num_calls = 0
        self._has_failed = False

    def push(self, text: str) -> list[AnswerEvent]:
        """Take more text; a character at a time, so that it is known what was read when something cannot be."""
        events: list[AnswerEvent] = []
        for place, character in enumerate(text):
            if self._has_failed:
                return [*events, ContentDelta(text[place:])]
            self._pending += character
            try:
                events += self._converted(self._parser.feed(character))
            except (ValueError, TypeError, LookupError, AttributeError):
                events += self._fail()
        return events

    def finish(self) -> list[AnswerEvent]:
        """What was held back."""
        if self._has_failed:
            return []
        try:
            _, events = self._parser.finalize()
            return self._converted(events)
        except (ValueError, TypeError, LookupError, AttributeError):
            return self._fail()

    def _fail(self) -> list[AnswerEvent]:
        self._has_failed = True
        return [ContentDelta(self._pending)] if self._pending else []

    def _converted(self, events: Sequence[Mapping[str, Any]]) -> list[AnswerEvent]:
        converted: list[AnswerEvent] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_chunk" and not event["dirty"] and field != "tool_calls":
                converted.append(ReasoningDelta(event["text"]) if field in _REASONING else ContentDelta(event["text"]))
                self._pending = ""
            elif kind == "region_close" and field == "tool_calls":
                value = event["value"]
                converted += [self._call(call) for call in (value if isinstance(value, list) else [value])]
                self._pending = ""
        return converted

    def _call(self, call: Mapping[str, Any]) -> ToolCallDelta:
        function = call.get("function", call)
        call_delta = parsed_call(self._num_calls, str(function["name"]), function["arguments"])
        self._num_calls += 1
        return call_delta
