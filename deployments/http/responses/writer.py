"""The body of a response, and the events of one that is streamed.

The output items of a response, as they come about.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from deployments.http.api import Api
from deployments.http.errors import ApiError
from deployments.http.formats import chat_entries
from deployments.http.generation import Generation, SampleDelta, ShownToken
from deployments.http.job import Job
from deployments.http.responses.items import StoredConversation
from deployments.http.schemas.fields import Body
from deployments.http.schemas.responses import ResponsesBody
from deployments.http.writing import AssistantMessage, Event, Json, UsageNames, Writer, WrittenList
from specdec.core.types import Finish
from specdec.structured.parsing.calls import AnswerEvent, ContentDelta, ReasoningDelta, ToolCallDelta

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputItem(Protocol):
    """One output item."""

    def added(self) -> list[Json]:
        """The events of a new item."""
        ...

    @property
    def num_characters(self) -> int:
        """How many its end repeats."""
        ...

    def more(self, text: str, logprobs: list[Json]) -> Json:
        """Take more text; the event that tells of it."""
        ...

    def done(self, status: ItemStatus) -> list[Json]:
        """The events of its end."""
        ...

    def written(self) -> Json:
        """The item as it is now."""
        ...


class TextOutput:
    """A message, or reasoning: one part of text.

    Args:
        index: Of the item in its response.
        is_reasoning: Which of them.
    """

    def __init__(self, index: int, *, is_reasoning: bool) -> None:
        self._is_reasoning = is_reasoning
        self._event = "response.reasoning_text" if is_reasoning else "response.output_text"
        self._id = f"{'rs' if is_reasoning else 'msg'}_{uuid.uuid4().hex}"
        self._place: Json = {"output_index": index}
        self._part_place = self._place | {"item_id": self._id, "content_index": 0}
        self._texts: list[str] = []
        self._num_characters = 0
        self._logprobs = WrittenList()
        self._status: ItemStatus = "in_progress"
        self._has_part = False

    def added(self) -> list[Json]:
        """The item without a part, and its part without text."""
        added = {"type": "response.output_item.added", **self._place, "item": self.written()}
        self._has_part = True
        return [added, {"type": "response.content_part.added", **self._part_place, "part": self._part()}]

    @property
    def num_characters(self) -> int:
        """How many its end repeats."""
        return self._num_characters + self._logprobs.num_characters

    def more(self, text: str, logprobs: list[Json]) -> Json:
        """More of the text."""
        self._texts.append(text)
        self._num_characters += len(text)
        self._logprobs.extend(logprobs)
        beside = {} if self._is_reasoning else {"logprobs": logprobs}
        return {"type": f"{self._event}.delta", **self._part_place, "delta": text, **beside}

    def done(self, status: ItemStatus) -> list[Json]:
        """The end of its text, of its part and its own."""
        self._status = status
        beside = {} if self._is_reasoning else {"logprobs": self._logprobs.copy()}
        return [
            {"type": f"{self._event}.done", **self._part_place, "text": "".join(self._texts), **beside},
            {"type": "response.content_part.done", **self._part_place, "part": self._part()},
            {"type": "response.output_item.done", **self._place, "item": self.written()},
        ]

    def written(self) -> Json:
        """The item as it is now."""
        content = [self._part()] if self._has_part else []
        if self._is_reasoning:
            return {"id": self._id, "type": "reasoning", "summary": [], "content": content, "status": self._status}
        return {"id": self._id, "type": "message", "role": "assistant", "content": content, "status": self._status}

    def _part(self) -> Json:
        text = "".join(self._texts)
        if self._is_reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs.copy()}


class CallOutput:
    """A call of a function.

    Args:
        index: Of the item in its response.
        name: The function's.
        call_id: By which the client's answer names it.
    """

    def __init__(self, index: int, name: str, call_id: str) -> None:
        self._call: Json = {"type": "function_call", "call_id": call_id, "name": name}
        self._id = f"fc_{uuid.uuid4().hex}"
        self._place: Json = {"output_index": index}
        self._arguments: list[str] = []
        self._status: ItemStatus = "in_progress"

    def added(self) -> list[Json]:
        """The call without arguments."""
        return [{"type": "response.output_item.added", **self._place, "item": self.written()}]

    @property
    def num_characters(self) -> int:
        """How many its end repeats."""
        return sum(map(len, self._arguments))

    def more(self, text: str, logprobs: list[Json]) -> Json:
        """More of its arguments."""
        self._arguments.append(text)
        return {
            "type": "response.function_call_arguments.delta",
            **self._place,
            "item_id": self._id,
            "delta": text,
        }

    def done(self, status: ItemStatus) -> list[Json]:
        """The end of its arguments, and its own."""
        self._status = status
        shown: Json = {**self._place, "item_id": self._id, "arguments": "".join(self._arguments)}
        return [
            {"type": "response.function_call_arguments.done", **shown},
            {"type": "response.output_item.done", **self._place, "item": self.written()},
        ]

    def written(self) -> Json:
        """The item as it is now."""
        return {"id": self._id, **self._call, "arguments": "".join(self._arguments), "status": self._status}


class Output:
    """Reads an answer, and makes of it output items and their events.

    Args:
        message: Reads the text.
        written_logprobs: Writes log probabilities down.
    """

    def __init__(
        self, message: AssistantMessage, written_logprobs: Callable[[Sequence[ShownToken]], list[Json]]
    ) -> None:
        self._message = message
        self._written_logprobs = written_logprobs
        self._items: list[OutputItem] = []
        self._kind = ""
        self._num_characters = 0
        self._pending: list[ShownToken] = []

    def read(self, delta: SampleDelta) -> list[Json]:
        """Take what is new; gives its events."""
        pieces: list[_Piece] = []
        for text, token, finish in self._cut(delta):
            if token is not None:
                self._pending.append(token)
            for event in self._message.read(text, finish):
                self._add(pieces, event)
        events = [event for piece in pieces for event in self._events_of(piece)]
        return events if delta.finish is None else events + self._end(delta.finish)

    def written(self) -> list[Json]:
        """All items as they are now."""
        return [item.written() for item in self._items]

    @property
    def num_characters(self) -> int:
        """About how long they are."""
        return sum(item.num_characters for item in self._items)

    def _cut(self, delta: SampleDelta) -> Iterator[tuple[str, ShownToken | None, Finish | None]]:
        """The text in pieces, so that what is made of a token's own piece tells whether it belongs to the message."""
        start = self._num_characters
        self._num_characters += len(delta.text)
        shown = delta.logprobs or ()
        begins = [0, *(min(max(token.offset - start, 0), len(delta.text)) for token in shown)]
        ends = [*begins[1:], len(delta.text)]
        tokens = [None, *shown]
        for number, (token, begin, end) in enumerate(zip(tokens, begins, ends, strict=True)):
            finish = delta.finish if number == len(shown) else None
            if begin < end or token is not None or finish is not None:
                yield delta.text[begin:end], token, finish

    def _add(self, pieces: list[_Piece], event: AnswerEvent) -> None:
        """Take a parser's event; neighbours of one kind become one piece."""
        match event:
            case ContentDelta():
                kind, text = "message", event.text
            case ReasoningDelta():
                kind, text = "reasoning", event.text
            case ToolCallDelta():
                kind, text = f"call {event.index}", event.arguments
        if not pieces or pieces[-1].kind != kind:
            pieces.append(_Piece(kind))
        pieces[-1].texts.append(text)
        if kind == "message":
            pieces[-1].tokens += self._pending
        self._pending = []

    def _events_of(self, piece: _Piece) -> Iterator[Json]:
        """The events of a piece: it goes on with the last item, or begins one."""
        if piece.kind != self._kind:
            yield from self._close("completed")
            yield from self._open(piece.kind)
        text, logprobs = "".join(piece.texts), self._written_logprobs(piece.tokens)
        if text or logprobs:
            yield self._items[-1].more(text, logprobs)

    def _open(self, kind: str) -> list[Json]:
        index = len(self._items)
        if kind in ("message", "reasoning"):
            self._items.append(TextOutput(index, is_reasoning=kind == "reasoning"))
        else:
            call = self._message.calls[int(kind.removeprefix("call "))]
            self._items.append(CallOutput(index, call.name, call.id))
        self._kind = kind
        return self._items[-1].added()

    def _close(self, status: ItemStatus) -> list[Json]:
        return self._items[-1].done(status) if self._kind else []

    def _end(self, finish: Finish) -> list[Json]:
        """The end of the last item; an answer that says nothing has an empty message."""
        events = [] if self._items else self._open("message")
        if self._kind == "message" and self._pending:
            events.append(self._items[-1].more("", self._written_logprobs(self._pending)))
        return events + self._close("completed" if finish == "stop" else "incomplete")


@dataclass(slots=True)
class _Piece:
    """Neighbouring events of one kind.

    Attributes:
        kind: ``message``, ``reasoning``, or ``call`` and its number.
        tokens: Those of a message whose log probabilities are shown.
    """

    kind: str
    texts: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)


_LONG = 1 << 12
"""Characters."""


class ResponseWriter(Writer):
    """Writes one response.

    Args:
        api: Its parts.
        job: The chat completion that the response is made of.
        body: What was asked for.
        kept: The response is kept there; None keeps it nowhere.
    """

    # Nothing is charged for what is cached for later.
    names = UsageNames("input_tokens", "output_tokens", {"cache_write_tokens": 0}, is_complete=True)

    def __init__(self, api: Api, job: Job, body: ResponsesBody, kept: StoredConversation | None = None) -> None:
        super().__init__(api, job)
        self._body = body
        self._output = Output(AssistantMessage(job.new_parser()), partial(chat_entries, api.texts))
        self._kept = kept
        # Whoever keeps responses lets no client name them: it could choose the name of another.
        self._id = f"resp_{job.context.label if kept is None else uuid.uuid4().hex}"
        self._finish: Finish | None = None
        self._end: Json | None = None
        self._num_events = 0

    @property
    def num_repeated(self) -> int:
        """What it was asked for, and its output; what has parts is not measured, and counts as long."""
        body = self._body
        has_parts = bool(body.tools) or (body.text is not None and body.text.format is not None)
        return len(body.instructions or "") + self._output.num_characters + (_LONG if has_parts else 0)

    def whole(self, choices: Sequence[SampleDelta], generation: Generation) -> Json:
        """The response, at its end."""
        (choice,) = choices
        self._output.read(choice)
        self._finish = choice.finish
        return self._ended(generation)

    def opening(self, generation: Generation) -> list[Event]:
        """A response without output."""
        response = self._response("in_progress")
        return [self._event({"type": f"response.{name}", "response": response}) for name in ("created", "in_progress")]

    def news(self, delta: SampleDelta, generation: Generation, num_sent: int) -> list[Event]:
        """What happens to its items."""
        self._finish = delta.finish
        return [self._event(event) for event in self._output.read(delta)]

    async def settle(self, generation: Generation) -> str:
        """Store the response; where that fails, the response says so."""
        if self._kept is None:
            return ""
        response = self._ended(generation)
        warning = await self._kept.keep(self._id, response, self.num_repeated)
        if warning:
            response |= {"store": False, "warning": warning}
        return warning

    def closing(self, generation: Generation) -> list[Event]:
        """The response, at its end."""
        response = self._ended(generation)
        return [self._event({"type": f"response.{response['status']}", "response": response})]

    def failed(self, error: ApiError) -> list[Event]:
        """The error, and the response as far as it has come."""
        event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        response = self._response("failed", error={"code": "server_error", "message": str(error)})
        return [self._event(event), self._event({"type": "response.failed", "response": response})]

    def _event(self, data: Json) -> Event:
        event = Event(data | {"sequence_number": self._num_events}, data["type"])
        self._num_events += 1
        return event

    def _ended(self, generation: Generation) -> Json:
        """The response at its end: the same to whoever asks for it."""
        is_whole = self._finish == "stop"
        if self._end is None:
            self._end = self._response(
                "completed" if is_whole else "incomplete",
                completed_at=int(time.time()) if is_whole else None,
                incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
                usage=self._usage(generation),
                **self._metrics(generation),
            )
        return self._end

    def _response(self, status: str, **of_status: object) -> Json:
        """The response with what it was asked for."""
        body, job = self._body, self._job
        sampling = job.sequences[0].spec.sampling
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(job.context.wall_s),
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": job.model.name,
            "output": self._output.written(),
            "usage": None,
            **self._versions(),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": _text_format(body)},
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "tools": [tool.model_dump() for tool in body.functions],
            "tool_choice": _tool_choice(body),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "truncation": body.truncation or "disabled",
            "previous_response_id": body.previous_response_id,
            "store": self._kept is not None,
            "background": False,
            "service_tier": "default",
            **of_status,
        }


def _text_format(body: ResponsesBody) -> Json:
    format_ = None if body.text is None else body.text.format
    if format_ is None or format_.type != "json_schema":
        return {"type": "text" if format_ is None else format_.type}
    return {
        "type": "json_schema",
        "name": format_.name,
        "schema": format_.json_schema,
        "strict": format_.strict,
        "description": format_.description,
    }


def _tool_choice(body: ResponsesBody) -> Json | str:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, Body) else choice or "auto"
