"""From a request for a response to one for a chat completion, and back in the errors of that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from deployments.openai.errors import ApiError
from deployments.openai.schemas.chat import ChatBody, ChatMessage, TemplatedBody
from deployments.openai.schemas.common import SamplingBody
from deployments.openai.schemas.responses import ResponsesBody, TextFormat
from deployments.openai.schemas.responses_input import Item, MessageItem
from specdec.errors import InvalidParameterError

_OF_BOTH = tuple(SamplingBody.model_fields | TemplatedBody.model_fields)
_RENAMED = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
_MESSAGE = re.compile(r"messages\[(\d+)\]")


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


class Turns(NamedTuple):
    """A conversation.

    Attributes:
        places: For each message, where the request has it.
    """

    messages: list[ChatMessage]
    places: list[str]


def turns_of(body: ResponsesBody) -> Turns:
    """The conversation that a request goes on with."""
    turns = Turns([], [])

    def add(place: str, **fields: Any) -> None:
        turns.messages.append(ChatMessage(**fields))
        turns.places.append(place)

    if body.instructions is not None:
        add("instructions", role="system", content=body.instructions)
    items: Sequence[Item] = body.input if isinstance(body.input, list) else ()
    for index, item in enumerate(items):
        if isinstance(item, MessageItem):
            add(f"input[{index}]", role=item.role, content=item.text)
    if isinstance(body.input, str):
        add("input", role="user", content=body.input)
    if not turns.messages:
        raise InvalidParameterError("input", "input must hold a message")
    return turns


def as_chat(body: ResponsesBody, turns: Turns) -> ResponseChat:
    """The chat request that has the same answer. Its fields have been checked as the request's own."""
    shared: dict[str, Any] = {name: getattr(body, name) for name in _OF_BOTH if name in body.model_fields_set}
    asked: dict[str, Any] = {
        "messages": turns.messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "response_format": None if body.text is None else _response_format(body.text.format),
    }
    return ResponseChat.model_construct(**shared, **asked)


def _response_format(format_: TextFormat | None) -> dict[str, Any] | None:
    if format_ is None or format_.type != "json_schema":
        return None if format_ is None else {"type": format_.type}
    return {"type": "json_schema", "json_schema": {"name": format_.name, "schema": format_.json_schema}}


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
    sent = _MESSAGE.sub(lambda found: turns.places[int(found[1])], param)
    for name, own in _RENAMED.items():
        if sent == name or sent.startswith((f"{name}.", f"{name}[")):
            sent = own + sent.removeprefix(name)
            break
    if param and sent != param:
        text = re.sub(rf"(?<!\w){re.escape(param)}(?!\w)", lambda _: sent, text)
    return sent, text.replace("response_format", "text.format")
