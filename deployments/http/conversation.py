"""From the messages of a request to the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from deployments.http.api import Api
from deployments.http.schemas.chat import ChatMessage, ConversationBody, ToolSpec
from specdec.core.errors import InvalidParameterError, UnsupportedParameterError
from specdec.text.prompts import encode_chat

_CHARACTERS_PER_TURN = 16
"""About as many are tokenized in the time that a template takes for an empty message."""
_LONG = 1 << 20
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


async def conversation_tokens(api: Api, messages: Sequence[ChatMessage], body: ConversationBody) -> list[int]:
    """Tokens of a conversation, through the request's template, the service's, or the tokenizer's.

    Raises:
        InvalidParameterError: The template refuses, or there is none.
        UnsupportedParameterError: The request brings a template, and the service does not trust it.
    """
    body.check_template()
    template = template_of(api, body)
    turns = _turns(messages)
    tools = [written_tool(tool) for tool in body.shown_tools]
    variables = _reasoning_variables(api, body) | (body.chat_template_kwargs or {})
    num_characters = _CHARACTERS_PER_TURN * len(turns) + sum(map(_length, messages))
    num_characters += _num_characters(variables) + (_LONG if tools else 0)

    def work() -> list[int]:
        return encode_chat(
            api.tokenizer,
            turns,
            template,
            variables,
            tools=tools,
            add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
        )

    return await api.encode(num_characters, work)


def template_of(api: Api, body: ConversationBody) -> str | None:
    """The request's template, or the service's; None for the tokenizer's own.

    Raises:
        UnsupportedParameterError: The request brings one, and the service does not trust it.
    """
    if body.chat_template is None:
        return api.settings.chat_template
    if not api.settings.trust_request_chat_template:
        raise UnsupportedParameterError(
            "chat_template", "chat_template is not taken from requests (trust_request_chat_template)"
        )
    return body.chat_template


def written_tool(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates know it."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    return {"type": "function", "function": function | {"parameters": tool.function.parameters or _NO_ARGUMENTS}}


def _reasoning_variables(api: Api, body: ConversationBody) -> dict[str, Any]:
    """How much is to be thought, in the words of the template."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    known = api.answers.of(template_of(api, body)).variables
    variables: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in known else {}
    return variables | ({"enable_thinking": effort != "none"} if "enable_thinking" in known else {})


def ignored_by_template(api: Api, body: ConversationBody) -> list[str]:
    """Fields of a conversation that have no effect because its template does not know them."""
    if body.reasoning_effort in (None, "none"):
        return []
    return [] if _reasoning_variables(api, body) else ["reasoning_effort"]


def _turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates know them; ``developer`` is OpenAI's newer name of ``system``."""
    turns: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": message.text}
        name = called.get(message.tool_call_id or "") if message.name is None else message.name
        if name is not None:
            turn["name"] = name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.thought is not None:
            turn |= {"reasoning_content": message.thought, "reasoning": message.thought}  # templates know either
        if message.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
                for call, arguments in zip(message.tool_calls, _arguments(message, place), strict=True)
            ]
            called |= {call.id: call.function.name for call in message.tool_calls}
        turns.append(turn)
    return turns


def _arguments(message: ChatMessage, place: int) -> list[dict[str, Any]]:
    """The arguments of a message's calls: templates write them themselves."""
    parsed: list[dict[str, Any]] = []
    for number, call in enumerate(message.tool_calls or ()):
        param = f"messages[{place}].tool_calls[{number}].function.arguments"
        try:
            arguments = from_json(call.function.arguments or "{}")  # it refuses half surrogate pairs
        except ValueError as error:
            raise InvalidParameterError(param, f"{param} must be the JSON text of an object: {error}") from error
        if not isinstance(arguments, dict):
            raise InvalidParameterError(param, f"{param} must be the JSON text of an object")
        parsed.append(arguments)
    return parsed


def _length(message: ChatMessage) -> int:
    calls = message.tool_calls or ()
    return len(message.text) + len(message.thought or "") + sum(len(c.function.arguments) for c in calls)


def _num_characters(variables: Mapping[str, Any]) -> int:
    """About how long a template's variables are; what has parts is not measured, and counts as long."""
    sizes = (len(v) if isinstance(v, str) else _LONG if isinstance(v, (list, dict)) else 1 for v in variables.values())
    return _CHARACTERS_PER_TURN * len(variables) + sum(sizes)
