"""An answer as JSON: the assistant's message, events, long lists, and what writes an answer, whole or as a stream."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployments.http.api import Api
from deployments.http.errors import ApiError
from deployments.http.generation import Generation, SampleDelta
from deployments.http.job import Job
from deployments.http.tally import answer_metrics
from specdec.core.types import Finish
from specdec.structured.parsing.calls import AnswerEvent, AnswerParser, ContentDelta, ReasoningDelta, ToolCallDelta

Json = dict[str, Any]

_REASONING = ("reasoning_content", "reasoning")
"""Names of a message's reasoning: DeepSeek's, which older clients read, and vLLM's of today."""


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
            message |= dict.fromkeys(_REASONING, self.reasoning)
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
                    thought = delta.get(_REASONING[0], "") + event.text
                    delta |= dict.fromkeys(_REASONING, thought)
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


_SLICE = 256
"""Items of a list that are written at once."""
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Event(NamedTuple):
    """One event of a stream.

    Attributes:
        name: What stands in its ``event`` line; empty where it has none.
    """

    data: Json
    name: str = ""

    def encoded(self) -> bytes:
        """The event as it is sent."""
        try:
            data = _dumps(self.data).encode()
        except TypeError:  # it holds a WrittenList
            data = json_bytes(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + b"data: " + data + b"\n\n"


class WrittenList:
    """A list whose items are JSON already: each is written once, however often the list is sent."""

    def __init__(self) -> None:
        self._runs: list[str] = []
        self.num_characters = 0

    def extend(self, items: list[Json]) -> None:
        """Write more items down."""
        if items:
            self._runs.append(_dumps(items)[1:-1])
            self.num_characters += len(self._runs[-1])

    def copy(self) -> WrittenList:
        """The list as it is now."""
        copied = WrittenList()
        copied._runs, copied.num_characters = self._runs.copy(), self.num_characters
        return copied

    def pieces(self) -> Iterator[str]:
        """The list as JSON, in pieces."""
        yield "["
        for number, run in enumerate(self._runs):
            yield f",{run}" if number else run
        yield "]"


def json_bytes(value: Any) -> bytes:
    """A value as JSON, as Starlette writes it; long lists by slices, so that other threads can run between them.

    ``json.dumps`` keeps the interpreter's lock to its end, which for a hundred megabytes is seconds.
    """
    return "".join(_pieces(value)).encode()


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, WrittenList):
        yield from value.pieces()
    elif isinstance(value, list) and len(value) > _SLICE:
        for start in range(0, len(value), _SLICE):
            yield ("," if start else "[") + _dumps(value[start : start + _SLICE])[1:-1]
        yield "]"
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield "," if number else "["
            yield from _pieces(item)
        yield "]" if value else "[]"
    elif isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield ("," if number else "{") + _dumps(name) + ":"
            yield from _pieces(item)
        yield "}" if value else "{}"
    else:
        yield _dumps(value)


@dataclass(frozen=True, slots=True)
class UsageNames:
    """What an API calls the numbers of its ``usage``.

    Attributes:
        prompt: Tokens of prompts.
        output: Tokens of choices.
        of_prompt: What else it says of prompts.
        is_complete: Whether details of the output are told though they are 0.
    """

    prompt: str
    output: str
    of_prompt: Json = field(default_factory=dict)
    is_complete: bool = False


class Writer(ABC):
    """Writes one answer: as one body, or as the events of a stream.

    Args:
        api: Its parts.
        job: What is answered.

    Attributes:
        end_mark: What a stream that did not fail ends with, after its last event.
        names: Those of its usage.
    """

    end_mark = b""
    names: UsageNames

    def __init__(self, api: Api, job: Job) -> None:
        self._api = api
        self._job = job

    @property
    def num_repeated(self) -> int:
        """About how many characters an answer repeats: a stream at its begin, at its end, and at that of a choice."""
        return 0

    @abstractmethod
    def whole(self, choices: Sequence[SampleDelta], generation: Generation) -> Json:
        """A whole answer; of each choice there is all."""

    @abstractmethod
    def opening(self, generation: Generation) -> Sequence[Event]:
        """What a stream begins with, before any token."""

    @abstractmethod
    def news(self, delta: SampleDelta, generation: Generation, num_sent: int) -> Sequence[Event]:
        """What is new in a choice.

        Args:
            delta: It.
            generation: Of all choices.
            num_sent: Output tokens that were sent up to these events, theirs included.
        """

    async def settle(self, generation: Generation) -> str:
        """Do what must be done before a client knows that the answer has ended.

        A whole answer was written before, a stream's end was not. Returns a warning for the client; empty for none.
        """
        return ""

    @abstractmethod
    def closing(self, generation: Generation) -> Sequence[Event]:
        """What a stream ends with, when all choices have ended."""

    @abstractmethod
    def failed(self, error: ApiError) -> Sequence[Event]:
        """What a stream ends with that cannot go on."""

    def _versions(self) -> Json:
        """What computes the answer."""
        version = self._job.model.weights_version
        return {"system_fingerprint": self._job.fingerprint} | ({"weights_version": version} if version else {})

    def _usage(self, generation: Generation, num_sent: int | None = None) -> Json:
        """The usage of all choices, or of what was sent of them so far."""
        names, prompt = self.names, self._job.num_prompt_tokens
        output = generation.num_completion_tokens if num_sent is None else num_sent
        details: Json = {}
        if names.is_complete or self._job.new_counter is not None:
            details["reasoning_tokens"] = generation.num_reasoning_tokens
        if self._job.has_prediction:
            details["accepted_prediction_tokens"] = sum(tally.num_predicted for tally in generation.tallies)
            details["rejected_prediction_tokens"] = sum(tally.num_mispredicted for tally in generation.tallies)
        usage = {
            names.prompt: prompt,
            f"{names.prompt}_details": {"cached_tokens": generation.num_cached_tokens, **names.of_prompt},
            names.output: output,
            "total_tokens": prompt + output,
        }
        return usage | ({f"{names.output}_details": details} if details else {})

    def _metrics(self, generation: Generation) -> Json:
        """What speculation did, where that was asked for."""
        detail = self._job.body.per_request_spec_decode_metrics
        return answer_metrics(generation.tallies, self._job.num_speculative_tokens, detail)
