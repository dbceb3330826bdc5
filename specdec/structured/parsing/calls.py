"""Parsers of answers with tool calls, and their events: JSON of Hermes, Qwen and Llama 3, and response templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Reads one answer, in pieces. The events do not depend on where the pieces are cut, but for its own cuts."""

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
        begun: Whether the call's name was reported.
        held: What was read and not yet reported.
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


BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Reads content and calls. What begins like a call and is none stays content, tags and all.

    Blanks next to a call belong to no content. Arguments are reported as they come, once a call has begun as usual: its
    name first.
    """

    def __init__(self) -> None:
        self._text = ""
        self._num_calls = 0
        self._call: CallReader | None = None

    def push(self, text: str) -> list[AnswerEvent]:
        """Take more text; blanks that may stand before a call are held back, as is a tag's beginning."""
        events: list[AnswerEvent] = []
        rest: str | None = text
        while rest is not None:
            rest = self._content(rest, events) if self._call is None else self._in_call(self._call, rest, events)
        return events

    def finish(self) -> list[AnswerEvent]:
        """What was held back."""
        events: list[AnswerEvent] = []
        call = self._call
        if call is None:
            if not self._num_calls or self._text.strip():
                _say(self._text, events)
        elif not call.begun:
            found = whole_call(call.held, self._num_calls)
            events.extend(found)
            if not found:
                _say(BEGIN + call.held, events)
        elif call.has_ended:
            rest = (call.after_brace() or "").strip()
            if not END.startswith(rest):
                _say(rest, events)
        self._text, self._call = "", None
        return events

    def _content(self, new: str, events: list[AnswerEvent]) -> str | None:
        """Read content; what follows a tag that was found."""
        self._text += new
        start = self._text.find(BEGIN)
        if start >= 0:
            rest = self._text[start + len(BEGIN) :]
            _say(self._text[:start].rstrip(), events)
            self._text, self._call = "", CallReader(self._num_calls)
            return rest
        certain = len(self._text) - unfinished(self._text, BEGIN)
        certain = len(self._text[:certain].rstrip())
        _say(self._text[:certain], events)
        self._text = self._text[certain:]
        return None

    def _in_call(self, call: CallReader, new: str, events: list[AnswerEvent]) -> str | None:
        """Read a call; what follows it, where it has ended."""
        events.extend(call.push(new))
        if not call.begun:
            return self._otherwise(call, events)
        if not call.has_ended:
            return None
        rest = call.after_brace()
        if rest is None or (rest != END and END.startswith(rest)):
            return None
        self._num_calls, self._call = self._num_calls + 1, None
        return rest.removeprefix(END) if rest.startswith(END) else rest

    def _otherwise(self, call: CallReader, events: list[AnswerEvent]) -> str | None:
        """A call that does not begin as usual is looked at when it is whole."""
        end = call.held.find(END)
        if end < 0:
            return None
        found = whole_call(call.held[:end], self._num_calls)
        events.extend(found)
        self._num_calls, self._call = self._num_calls + len(found), None
        if not found:
            _say(BEGIN + call.held[: end + len(END)], events)
        return call.held[end + len(END) :]


TAG, SEPARATOR = "<|python_tag|>", ";"


class Llama3Parser:
    """Reads an answer that is calls, after ``<|python_tag|>`` or without, or else all content.

    What stands before the first call decides: anything but blanks and the tag makes the whole answer content. What
    follows a call and is no other call is content too.
    """

    def __init__(self) -> None:
        self._text = ""
        self._num_calls = 0
        self._is_content = False
        self._call: CallReader | None = None

    def push(self, text: str) -> list[AnswerEvent]:
        """Take more text; what may yet be a call is held back."""
        events: list[AnswerEvent] = []
        rest: str | None = text
        while rest is not None:
            if self._is_content:
                _say(rest, events)
                rest = None
            elif self._call is None:
                rest = self._before_call(rest)
            else:
                rest = self._in_call(self._call, rest, events)
        return events

    def finish(self) -> list[AnswerEvent]:
        """What was held back."""
        events: list[AnswerEvent] = []
        call = self._call
        if call is None:
            text = self._text.replace(TAG, "", 1)
            if not self._num_calls or text.strip(f"{SEPARATOR} \n"):
                _say(text, events)
        elif not call.begun:
            found = whole_call(call.held, self._num_calls)
            events.extend(found)
            if not found:
                _say(self._text + call.held, events)
        elif call.has_ended:
            _say((call.after_brace() or "").strip(), events)
        self._text, self._call = "", None
        return events

    def _before_call(self, new: str) -> str | None:
        """Read up to a call's brace; what follows, be it a call or content."""
        self._text += new
        text = self._text.lstrip()
        if self._num_calls:
            text = text.removeprefix(SEPARATOR).lstrip() if text else text
        elif text.startswith(TAG):
            text = text[len(TAG) :].lstrip()
        if not text or (not self._num_calls and TAG.startswith(text)):
            return None
        follows = not self._num_calls or self._text.lstrip().startswith(SEPARATOR)
        if text.startswith("{") and follows:
            # What stands before it is kept, in case that it is none.
            self._text = self._text[: len(self._text) - len(text)].replace(TAG, "")
            self._call = CallReader(self._num_calls)
            return text
        text, self._text, self._is_content = self._text, "", True
        return text.replace(TAG, "", 1) if not self._num_calls else text

    def _in_call(self, call: CallReader, new: str, events: list[AnswerEvent]) -> str | None:
        """Read a call; what follows it, where it has ended."""
        events.extend(call.push(new))
        if call.begun:
            self._text = ""
        if not call.has_ended:
            return None
        rest = call.after_brace()
        if not rest:
            return None
        self._num_calls, self._call = self._num_calls + 1, None
        return rest


def _say(text: str, events: list[AnswerEvent]) -> None:
    if text:
        events.append(ContentDelta(text))


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
