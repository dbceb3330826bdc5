"""Tool calls as Llama 3 writes them: an answer that is ``{"name": ..., "parameters": ...}``, or several by ``;``."""

from __future__ import annotations

from specdec.structured.parsing.calls import AnswerEvent, CallReader, ContentDelta, whole_call

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
        told = self._text.lstrip()
        if self._num_calls:
            told = told.removeprefix(SEPARATOR).lstrip() if told else told
        elif told.startswith(TAG):
            told = told[len(TAG) :].lstrip()
        if not told or (not self._num_calls and TAG.startswith(told)):
            return None
        follows = not self._num_calls or self._text.lstrip().startswith(SEPARATOR)
        if told.startswith("{") and follows:
            # What stands before it is kept, in case that it is none.
            self._text = self._text[: len(self._text) - len(told)].replace(TAG, "")
            self._call = CallReader(self._num_calls)
            return told
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
