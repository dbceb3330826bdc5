"""``POST /v1/responses``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from deployments.openai.answers import answer
from deployments.openai.context import ApiOf, ArrivalOf
from deployments.openai.ignored import with_ignored
from deployments.openai.job import chat_job
from deployments.openai.responses.translation import as_chat, named_as_sent, turns_of
from deployments.openai.responses.writer import ResponseWriter
from deployments.openai.schemas.responses import ResponsesBody
from deployments.openai.strict_json import StrictJsonRoute

router = APIRouter(prefix="/v1", route_class=StrictJsonRoute)


@router.post("/responses", response_model=None)
async def responses(body: ResponsesBody, request: Request, api: ApiOf, arrival: ArrivalOf) -> Response:
    """Go on with a conversation, in the words of OpenAI's newer API."""
    ignored = api.ignored.names(body)
    body.check_together()
    turns = await api.encode(body.num_characters, lambda: turns_of(body))
    with named_as_sent(turns):
        job = await chat_job(api, as_chat(body, turns), arrival)
        answered = await answer(api, job, ResponseWriter(api, job, body), request)
    return with_ignored(answered, ignored)
