"""``POST /v1/responses``, and what becomes of responses that are kept."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from deployments.http.answers import answer, while_connected
from deployments.http.api import Api, ApiOf, ContextOf
from deployments.http.conversation import conversation_tokens, ignored_by_template
from deployments.http.errors import ApiError
from deployments.http.job import chat_job
from deployments.http.request_context import RequestContext
from deployments.http.responses.items import (
    Record,
    StoredConversation,
    Turns,
    as_chat,
    conversation_of,
    earlier_record,
    named_as_sent,
    owner_of,
    read_items,
    turns_of,
    written_items,
)
from deployments.http.responses.writer import ResponseWriter
from deployments.http.schemas.responses import Included, ResponsesBody
from deployments.http.store import Store
from deployments.http.strict_json import StrictJsonRoute
from deployments.http.writing import Json, json_bytes
from specdec.core.errors import UnsupportedParameterError

router = APIRouter(prefix="/v1", route_class=StrictJsonRoute)


@router.post("/responses", response_model=None)
async def responses(body: ResponsesBody, request: Request, api: ApiOf, context: ContextOf) -> Response:
    """Go on with a conversation, in the words of OpenAI's newer API."""
    if body.other_tools() and api.settings.unsupported_tools == "refuse":
        (place, kind), *_ = body.other_tools()
        text = f"{place}.type must be 'function': {kind[:64]!r} is not supported"
        raise UnsupportedParameterError(f"{place}.type", text)
    dropped = ["tools.type" for _ in body.other_tools()]
    body.check_together(has_store=api.store is not None)
    await api.look_for(body.model)
    record = await earlier_record(api, context, body)
    num_characters = body.num_characters + (0 if record is None else len(record.packed()))

    def work() -> tuple[Turns, StoredConversation | None]:
        earlier = [] if record is None else conversation_of(record)
        turns = turns_of(body, read_items(earlier))
        if api.store is None or body.store is False:
            return turns, None
        items = earlier + written_items(body)
        return turns, StoredConversation(api, api.store, owner_of(context), items, num_characters)

    turns, kept = await api.encode(num_characters, work)
    if body.truncation == "auto":
        turns = await while_connected(request.receive, _fitted(api, body, turns))
    chat = as_chat(body, turns)
    dropped += ["reasoning.effort" for _ in ignored_by_template(api, chat)]
    api.ignored.note(body, dropped)
    with named_as_sent(turns):
        job = await while_connected(request.receive, chat_job(api, chat, context))
        return await answer(api, job, ResponseWriter(api, job, body, kept), request)


async def _fitted(api: Api, body: ResponsesBody, turns: Turns) -> Turns:
    """A conversation without its oldest turns, as many as must go for the rest and the output to fit.

    The system messages that it begins with stay, and so does its last turn: where these alone are too long, the request
    is refused later.
    """
    room = api.model(body.model).max_model_len - (body.max_output_tokens or 1)

    async def fits(begun: Turns) -> bool:
        with named_as_sent(begun):
            chat = as_chat(body, begun)
            return len(await conversation_tokens(api, chat.messages, chat)) <= room

    if await fits(turns):
        return turns
    cuts = turns.cuts()
    low, high = 1, len(cuts) - 1  # of the cuts; what begins at ``high`` is taken to fit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(turns.begun_at(cuts[middle])) else (middle + 1, high)
    return turns.begun_at(cuts[high])


@router.get("/responses/{response_id}", response_model=None)
async def kept_response(
    response_id: str,
    api: ApiOf,
    context: ContextOf,
    include: Annotated[list[Included] | None, Query()] = None,
    include_: Annotated[list[Included] | None, Query(alias="include[]")] = None,
    stream: bool = False,
) -> Response:
    """A response that is kept, as it was sent: with log probabilities where it was made with them."""
    if stream:
        raise ApiError(400, "stream: a kept response is not streamed", param="stream", code="unsupported_parameter")
    record = await _record(api, context, response_id)
    return Response(record.response, media_type="application/json")


@router.delete("/responses/{response_id}")
async def forget_response(response_id: str, api: ApiOf, context: ContextOf) -> dict[str, Any]:
    """Keep a response no longer."""
    if not await _store(api, response_id).delete(owner_of(context), response_id):
        raise _not_found(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/responses/{response_id}/input_items", response_model=None)
async def input_items(
    response_id: str,
    api: ApiOf,
    context: ContextOf,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items of the conversation up to a response, the newest first."""
    record = await _record(api, context, response_id)

    def work() -> bytes:
        items: list[Json] = json.loads(record.input_items)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise ApiError(400, "after: there is no such item", param="after", code="invalid_value")
        start = 0 if after is None else ids.index(after) + 1
        page = items[start : start + limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return json_bytes({"object": "list", "data": page, **ends, "has_more": start + limit < len(items)})

    return Response(await api.encode(len(record.input_items), work), media_type="application/json")


def _store(api: Api, response_id: str) -> Store:
    if api.store is None:
        raise _not_found(response_id)
    return api.store


async def _record(api: Api, context: RequestContext, response_id: str) -> Record:
    found = await _store(api, response_id).get(owner_of(context), response_id)
    if found is None:
        raise _not_found(response_id)
    return Record.unpacked(found)


def _not_found(response_id: str) -> ApiError:
    text = f"there is no response {response_id[:64]!r}, or none any more"
    return ApiError(404, text, param="response_id", code="response_not_found")
