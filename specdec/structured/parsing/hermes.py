"""Tool calls between tags, as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from __future__ import annotations

from specdec.structured.parsing.calls import AnswerEvent, CallReader, ContentDelta, unfinished, whole_call

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Reads content and calls. What begins like a call and is none stays content, tags and all.

    Blanks next to a call belong to no content. Arguments are told of as they come, once a call has begun as usual: its
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
                self._say(self._text, events)
        elif not call.begun:
            found = whole_call(call.held, self._num_calls)
            events.extend(found)
            if not found:
                self._say(BEGIN + call.held, events)
        elif call.has_ended:
            rest = (call.after_brace() or "").strip()
            if not END.startswith(rest):
                self._say(rest, events)
        self._text, self._call = "", None
        return events

    def _content(self, new: str, events: list[AnswerEvent]) -> str | None:
        """Read content; what follows a tag that was found."""
        self._text += new
        start = self._text.find(BEGIN)
        if start >= 0:
            rest = self._text[start + len(BEGIN) :]
            self._say(self._text[:start].rstrip(), events)
            self._text, self._call = "", CallReader(self._num_calls)
            return rest
        certain = len(self._text) - unfinished(self._text, BEGIN)
        certain = len(self._text[:certain].rstrip())
        self._say(self._text[:certain], events)
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
            self._say(BEGIN + call.held[: end + len(END)], events)
        return call.held[end + len(END) :]

    @staticmethod
    def _say(text: str, events: list[AnswerEvent]) -> None:
        if text:
            events.append(ContentDelta(text))
