"""What a model thinks before it answers, between tags: split from the answer, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specdec.structured.parsing.calls import AnswerEvent, AnswerParser, ReasoningDelta, unfinished


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Between what reasoning stands, at an answer's beginning.

    Attributes:
        begin: May be left out where the prompt ends with it.
        end: What follows is the answer.
    """

    begin: str
    end: str


class ReasoningParser:
    """Reads reasoning, then leaves the rest to another parser. Line ends next to a tag belong to neither.

    Args:
        tags: Around the reasoning.
        has_begun: The prompt ends within the reasoning.
        answer: Reads what follows it.
    """

    def __init__(self, tags: ReasoningTags, has_begun: bool, answer: AnswerParser) -> None:
        self._tags = tags
        self._answer = answer
        self._text = ""
        self._read: Callable[[], list[AnswerEvent]] = self._before_begin
        self._has_begun = has_begun

    def push(self, text: str) -> list[AnswerEvent]:
        """Take more text; what may yet be part of a tag is held back, and line ends that may stand next to one."""
        self._text += text
        return self._read()

    def finish(self) -> list[AnswerEvent]:
        """What was held back."""
        text, self._text = self._text, ""
        if self._read == self._in_reasoning:
            return [ReasoningDelta(text)] if text.rstrip("\n") else []
        if self._read == self._before_begin and self._has_begun:
            return [ReasoningDelta(text)] if text else []
        return (self._answer.push(text) if text else []) + self._answer.finish()

    def _before_begin(self) -> list[AnswerEvent]:
        text, begin = self._text.lstrip(), self._tags.begin
        if len(text) < len(begin) and begin.startswith(text):
            return []
        if text.startswith(begin):
            self._text = text[len(begin) :]
        elif not self._has_begun:
            return self._go_on(self._in_answer)
        return self._go_on(self._after_begin)

    def _after_begin(self) -> list[AnswerEvent]:
        self._text = self._text.lstrip("\n")
        return self._go_on(self._in_reasoning) if self._text else []

    def _in_reasoning(self) -> list[AnswerEvent]:
        end = self._text.find(self._tags.end)
        if end >= 0:
            thought = self._text[:end].rstrip("\n")
            self._text = self._text[end + len(self._tags.end) :]
            return [*_thought(thought), *self._go_on(self._after_end)]
        certain = len(self._text) - unfinished(self._text, self._tags.end)
        certain = len(self._text[:certain].rstrip("\n"))
        thought, self._text = self._text[:certain], self._text[certain:]
        return _thought(thought)

    def _after_end(self) -> list[AnswerEvent]:
        self._text = self._text.lstrip("\n")
        return self._go_on(self._in_answer) if self._text else []

    def _in_answer(self) -> list[AnswerEvent]:
        text, self._text = self._text, ""
        return self._answer.push(text)

    def _go_on(self, read: Callable[[], list[AnswerEvent]]) -> list[AnswerEvent]:
        self._read = read
        return read()


class WithoutReasoning:
    """Tells all that another parser does, but for reasoning.

    Args:
        inner: That parser.
    """

    def __init__(self, inner: AnswerParser) -> None:
        self._inner = inner

    def push(self, text: str) -> list[AnswerEvent]:
        """Take more text."""
        return [event for event in self._inner.push(text) if not isinstance(event, ReasoningDelta)]

    def finish(self) -> list[AnswerEvent]:
        """What was held back."""
        return [event for event in self._inner.finish() if not isinstance(event, ReasoningDelta)]


class ReasoningCounter:
    """Counts the tokens of an answer that are reasoning: those that begin before the tag that ends it does.

    Args:
        tags: Around the reasoning; those tokens that write a tag do not count.
        has_begun: The prompt ends within the reasoning.
        bytes_of: The bytes that a token writes.
    """

    def __init__(self, tags: ReasoningTags, has_begun: bool, bytes_of: Callable[[int], bytes]) -> None:
        self._begin, self._end = tags.begin.encode(), tags.end.encode()
        self._bytes_of = bytes_of
        self._text = b""
        self._starts: list[int] = []
        self._may_begin, self._is_open = not has_begun, True
        self.num_tokens = 0

    def push(self, tokens: Iterable[int]) -> None:
        """Take an answer's next tokens."""
        for token in tokens:
            if not self._is_open:
                return
            self._push(self._bytes_of(token))

    def _push(self, text: bytes) -> None:
        start = len(self._text)
        self._text += text
        if self._may_begin:
            text = self._text.lstrip()
            if len(text) < len(self._begin) and self._begin.startswith(text):
                return
            self._may_begin, self._is_open = False, text.startswith(self._begin)
            self._text = text[len(self._begin) :]
            start = 0
            if not self._is_open or not self._text:
                return
        self._starts.append(start)
        self.num_tokens += 1
        end = self._text.find(self._end)
        if end >= 0:
            self._is_open = False
            self.num_tokens -= sum(start >= end for start in self._starts)
            return
        # What is certain to stand before the tag is let go.
        kept = max(len(self._text) - len(self._end) + 1, 0)
        self._starts = [start - kept for start in self._starts if start >= kept]
        self._text = self._text[kept:]


def _thought(text: str) -> list[AnswerEvent]:
    return [ReasoningDelta(text)] if text else []
