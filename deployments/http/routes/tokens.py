"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from deployments.http.context import Api, ApiOf
from deployments.http.conversation import conversation_tokens
from deployments.http.ignored import with_ignored
from deployments.http.messages import Json
from deployments.http.schemas.tokens import DetokenizeBody, TokenizeBody
from deployments.http.strict_json import StrictJsonRoute
from deployments.http.writing import json_bytes
from specdec.text.prompts import check_token_ids

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, api: ApiOf) -> Response:
    """The tokens of a text or a conversation."""
    ignored = api.ignored.names(body)
    body.check_together()
    await api.look_for(body.model)
    model = api.model(body.model)
    held = [await _tokens(api, body)]
    count = len(held[0])

    def write() -> Response:
        tokens = held.pop()  # a million integers are let go of here, not on the event loop
        answer: Json = {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [api.texts.text(token) for token in tokens]
        return Response(json_bytes(answer), media_type="application/json")

    return with_ignored(await api.write(count, write), ignored)


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, api: ApiOf) -> Response:
    """The text of tokens, special ones included."""
    ignored = api.ignored.names(body)
    await api.look_for(body.model)
    model = api.model(body.model)

    def write() -> Response:
        if body.tokens:
            check_token_ids(body.tokens, model.vocab_size, "tokens")
        return JSONResponse({"prompt": api.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)})

    return with_ignored(await api.write(len(body.tokens), write), ignored)


async def _tokens(api: Api, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        return await conversation_tokens(api, body.messages, body)
    text, add_special = body.prompt or "", body.add_special_tokens is not False
    tokens: list[int] = await api.encode(len(text), lambda: api.tokenizer.encode(text, add_special_tokens=add_special))
    return tokens
