"""From responses to what is kept of them, and back to the conversation that they are part of."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from deployments.http.api import Api
from deployments.http.errors import ApiError
from deployments.http.messages import Json
from deployments.http.request_context import RequestContext
from deployments.http.schemas.responses import (
    CallItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    ResultItem,
)
from deployments.http.store import Store
from deployments.http.writing import json_bytes
from specdec.core.errors import InvalidParameterError, ServiceUnavailableError

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
            _logger.warning("The response %s is not stored: %s", name, error)
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
