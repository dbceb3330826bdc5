"""Items of the Responses API: as a request for a chat completion, and as they are stored and read again."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deployments.http.api import Api
from deployments.http.errors import ApiError
from deployments.http.request_context import RequestContext
from deployments.http.schemas.chat import (
    MOST_CALLS,
    AllowedChoice,
    AllowedTools,
    CalledFunction,
    CallSpec,
    ChatBody,
    ChatMessage,
    ChosenFunction,
    FunctionSpec,
    NamedChoice,
    TemplatedBody,
    ToolSpec,
)
from deployments.http.schemas.common import SamplingBody
from deployments.http.schemas.responses import (
    AllowedFunctions,
    CallItem,
    FunctionChoice,
    FunctionTool,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    ResponsesToolChoice,
    ResultItem,
    TextFormat,
)
from deployments.http.store import Store
from deployments.http.writing import Json, json_bytes
from specdec.core.errors import InvalidParameterError, ServiceUnavailableError

_OF_BOTH = (
    *(SamplingBody.model_fields | TemplatedBody.model_fields),
    *("thinking_token_budget", "include_reasoning", "parallel_tool_calls"),
)
_RENAMED = (
    (re.compile(r"^response_format(\.json_schema)?(?!\w)"), "text.format"),
    (re.compile(r"^max_tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^(tools\[\d+\])\.function(?!\w)"), r"\1"),
    (re.compile(r"^messages$"), "input"),
)
_MESSAGE = re.compile(r"^messages\[\d+\](\.tool_calls\[\d+\])?(\.function)?")


class ResponseChat(ChatBody):
    """A chat request whose parameters have the names that they have in a request for a response."""

    @property
    def output_limit_name(self) -> str:
        """What the request calls its limit."""
        return "max_output_tokens"

    @property
    def prompt_name(self) -> str:
        """What the request calls its prompt."""
        return "input"


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation.

    Attributes:
        places: For messages, and calls in them, by the names that chat has for them: where the request has them.
    """

    messages: list[ChatMessage]
    places: dict[str, str]

    def cuts(self) -> list[int]:
        """Where the conversation may begin after what its system messages say at first: there, or at a later turn."""
        roles = [message.role for message in self.messages]
        head = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
        return [head, *(i for i in range(head + 1, len(roles)) if roles[i] == "user")]

    def begun_at(self, cut: int) -> Turns:
        """The conversation without the turns between those system messages and a cut."""
        # What is wrong with a single message was found when the whole was tried, so the places stay as they are.
        return Turns(self.messages[: self.cuts()[0]] + self.messages[cut:], self.places)


def turns_of(body: ResponsesBody, earlier: Sequence[InputItem] = ()) -> Turns:
    """The conversation that a request goes on with.

    Args:
        body: The request.
        earlier: What was said up to the response that it names.

    Raises:
        InvalidParameterError: It says nothing, or has too many calls in a row.
    """
    turns = _Turns()
    if body.instructions is not None:
        turns.add("instructions", role="system", content=body.instructions)
    for item in earlier:
        turns.take("previous_response_id", item)
    if isinstance(body.input, str):
        turns.add("input", role="user", content=body.input)
    else:
        for index, item in enumerate(body.input):
            turns.take(f"input[{index}]", item)
    if not turns.messages:
        raise InvalidParameterError("input", "input must hold a message")
    return Turns([ChatMessage(**message) for message in turns.messages], turns.places)


@dataclass(slots=True)
class _Turns:
    """Items become messages: what the assistant thinks, says and then calls is one."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    _thought: str = ""

    def add(self, place: str, **fields: Any) -> None:
        """Add a message; what was thought goes with it if it is the assistant's, and is of no use else."""
        if self._thought and fields["role"] == "assistant":
            fields["reasoning_content"] = self._thought
        self._thought = ""
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(fields)

    def take(self, place: str, item: InputItem) -> None:
        """Take the next item."""
        match item:
            case MessageItem():
                self.add(place, role=item.role, content=item.text)
            case ReasoningItem():
                self._thought += item.text
            case ResultItem():
                self.add(place, role="tool", content=item.text, tool_call_id=item.call_id)
            case CallItem():
                self._call(place, item)

    def _call(self, place: str, item: CallItem) -> None:
        if self._thought or not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(place, role="assistant", content=None)
        calls = self.messages[-1].setdefault("tool_calls", [])
        if len(calls) == MOST_CALLS:
            raise InvalidParameterError(place, f"{place}: at most {MOST_CALLS} calls in a row are taken")
        self.places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = place
        function = CalledFunction(name=item.name, arguments=item.arguments)
        calls.append(CallSpec(id=item.call_id, type="function", function=function))


def as_chat(body: ResponsesBody, turns: Turns) -> ResponseChat:
    """The chat request that has the same answer. Its fields have been checked as the request's own."""
    shared: dict[str, Any] = {name: getattr(body, name) for name in _OF_BOTH if name in body.model_fields_set}
    asked: dict[str, Any] = {
        "messages": turns.messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "response_format": None if body.text is None else _response_format(body.text.format),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.functions],
        "tool_choice": _tool_choice(body.tool_choice) if body.functions or body.tool_choice != "auto" else None,
    }
    return ResponseChat.model_construct(**shared, **asked, store=body.store)


def _response_format(format_: TextFormat | None) -> dict[str, Any] | None:
    if format_ is None or format_.type != "json_schema":
        return None if format_ is None else {"type": format_.type}
    return {"type": "json_schema", "json_schema": {"name": format_.name, "schema": format_.json_schema}}


def _tool(tool: FunctionTool) -> ToolSpec:
    function = FunctionSpec(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolSpec(type="function", function=function)


def _tool_choice(choice: ResponsesToolChoice | None) -> NamedChoice | AllowedChoice | str | None:
    match choice:
        case FunctionChoice():
            return _named(choice)
        case AllowedFunctions():
            allowed = AllowedTools(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
            return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(choice: FunctionChoice) -> NamedChoice:
    return NamedChoice(type="function", function=ChosenFunction(name=choice.name))


@contextmanager
def named_as_sent(turns: Turns) -> Iterator[None]:
    """Around what speaks of a chat request: its errors name parameters as the request for a response does.

    Raises:
        ApiError, InvalidParameterError: The same, in its words.
    """
    try:
        yield
    except InvalidParameterError as error:
        param, text = _as_sent(error.parameter, str(error), turns)
        raise type(error)(param, text, error.code) from error
    except ApiError as error:
        param, text = _as_sent(error.param or "", str(error), turns)
        raise ApiError(error.status, text, error.kind, param or None, error.code, error.headers) from error


def _as_sent(param: str, text: str, turns: Turns) -> tuple[str, str]:
    """A parameter and a text that may name it, in the request's words."""
    sent = _MESSAGE.sub(lambda found: turns.places[found[0].removesuffix(".function")], param)
    for pattern, own in _RENAMED:
        sent = pattern.sub(own, sent)
    if param and sent != param:
        text = re.sub(rf"(?<!\w){re.escape(param)}(?!\w)", lambda _: sent, text)
    return sent, text.replace("response_format", "text.format")


_logger = logging.getLogger("ray.serve")
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def owner_of(context: RequestContext) -> str:
    """Whose responses a request may see: those of its API key, by name; where none is asked for, of what it sends."""
    stats = context.stats
    return f"key {stats.key}" if stats.key else f"caller {context.caller}"


@dataclass(frozen=True, slots=True)
class Record:
    """A stored response, as JSON.

    Attributes:
        response: The response.
        input_items: Of the conversation up to it, a list.
    """

    response: bytes
    input_items: bytes

    def packed(self) -> bytes:
        """As one value: JSON on two lines."""
        return self.response + b"\n" + self.input_items

    @classmethod
    def unpacked(cls, value: bytes) -> Record:
        """What :meth:`packed` gave."""
        response, _, input_items = value.partition(b"\n")
        return cls(response, input_items)


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Where a response goes when it has ended.

    Attributes:
        items: Of the conversation up to it, as they are kept.
        num_characters: About how long those are.
    """

    api: Api
    store: Store
    owner: str
    items: list[Json]
    num_characters: int

    async def keep(self, name: str, response: Json, num_characters: int) -> str:
        """Keep it; returns why it was not kept: its tokens were generated, so the answer goes out all the same.

        Args:
            name: Its id.
            response: It.
            num_characters: About how long it is.
        """

        def work() -> bytes:
            return Record(json_bytes(response), json_bytes(self.items)).packed()

        try:
            packed = await self.api.encode(self.num_characters + num_characters, work)
            is_kept = await self.store.put(self.owner, name, packed)
        except ServiceUnavailableError as error:
            _logger.warning("Response %s was answered but not stored: %s", name, error)
            return "the response is not stored: the store does not answer"
        return "" if is_kept else "the response is not stored: it is larger than responses_store.max_bytes"


async def earlier_record(api: Api, context: RequestContext, body: ResponsesBody) -> Record | None:
    """The response that a request goes on from, if it names one.

    Raises:
        ApiError: There is no such response.
        ServiceUnavailableError: The store does not answer.
    """
    name = body.previous_response_id
    if name is None or api.store is None:
        return None
    found = await api.store.get(owner_of(context), name)
    if found is None:
        text = f"previous_response_id: there is no response {name!r}, or none any more"
        raise ApiError(400, text, param="previous_response_id", code="previous_response_not_found")
    return Record.unpacked(found)


def conversation_of(record: Record) -> list[Json]:
    """The items of the conversation up to the end of a stored response, without log probabilities."""
    items: list[Json] = json.loads(record.input_items)
    output: list[Json] = json.loads(record.response)["output"]
    for part in (part for item in output for part in item.get("content") or ()):
        if part.get("logprobs"):
            part["logprobs"] = []
    return items + output


def read_items(items: Sequence[Json]) -> list[InputItem]:
    """Kept items as those of a request.

    Raises:
        InvalidParameterError: The model has written what no request may say, such as a call's name that is too long.
    """
    try:
        return _ITEMS.validate_python(items)
    except ValidationError as error:
        first = error.errors()[0]
        text = f"previous_response_id: item {first['loc'][0]} of that conversation cannot be taken: {first['msg']}"
        raise InvalidParameterError("previous_response_id", text) from error


def written_items(body: ResponsesBody) -> list[Json]:
    """The items of a request as they are kept, each with an id."""
    if isinstance(body.input, str):
        return [_message("user", body.input)]
    return [_item(item) for item in body.input]


def _item(item: InputItem) -> Json:
    match item:
        case MessageItem():
            return _message(item.role, item.text)
        case ReasoningItem():
            content = [{"type": "reasoning_text", "text": item.text}]
            return {"id": _id("rs"), "type": "reasoning", "summary": [], "content": content}
        case CallItem():
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {"id": _id("fc"), "type": "function_call", **call, "status": "completed"}
        case ResultItem():
            result = {"call_id": item.call_id, "output": item.text}
            return {"id": _id("fco"), "type": "function_call_output", **result, "status": "completed"}


def _message(role: str, text: str) -> Json:
    part: Json = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": _id("msg"), "type": "message", "role": role, "content": [part], "status": "completed"}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
