"""``POST /v1/completions`` and ``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from deployments.http.answers import answer, while_connected
from deployments.http.context import ApiOf, ArrivalOf
from deployments.http.conversation import ignored_by_template
from deployments.http.formats import ChatFormat, CompletionFormat, Envelope
from deployments.http.ignored import with_ignored
from deployments.http.job import chat_job, completion_job
from deployments.http.schemas.chat import ChatBody
from deployments.http.schemas.completions import CompletionBody
from deployments.http.strict_json import StrictJsonRoute

router = APIRouter(prefix="/v1", route_class=StrictJsonRoute)


@router.post("/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, api: ApiOf, arrival: ArrivalOf) -> Response:
    """Go on with a text."""
    ignored = api.ignored.names(body)
    await api.look_for(body.model)
    job = await while_connected(request.receive, completion_job(api, body, arrival))
    return with_ignored(await answer(api, job, Envelope(job, CompletionFormat(api, job)), request), ignored)


@router.post("/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, api: ApiOf, arrival: ArrivalOf) -> Response:
    """Go on with a conversation."""
    ignored = api.ignored.names(body, ignored_by_template(api, body))
    await api.look_for(body.model)
    job = await while_connected(request.receive, chat_job(api, body, arrival))
    return with_ignored(await answer(api, job, Envelope(job, ChatFormat(api, job)), request), ignored)
