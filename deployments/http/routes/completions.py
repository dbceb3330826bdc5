"""Text in, text or tokens out: completions, chat completions, SageMaker's ``/invocations``, and tokens of texts."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from deployments.http.answers import answer, while_connected
from deployments.http.api import Api, ApiOf, ContextOf
from deployments.http.conversation import conversation_tokens, ignored_by_template
from deployments.http.formats import ChatWriter, CompletionWriter
from deployments.http.job import chat_job, completion_job
from deployments.http.schemas.chat import ChatBody, ChatMessages, CompletionBody, ConversationBody
from deployments.http.schemas.fields import Body, TokenList
from deployments.http.strict_json import StrictJsonRequest, StrictJsonRoute
from deployments.http.writing import Json, json_bytes
from specdec.core.errors import InvalidParameterError
from specdec.text.prompts import check_token_ids

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, api: ApiOf, context: ContextOf) -> Response:
    """Go on with a text."""
    api.ignored.note(body)
    await api.look_for(body.model)
    job = await while_connected(request.receive, completion_job(api, body, context))
    return await answer(api, job, CompletionWriter(api, job), request)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, api: ApiOf, context: ContextOf) -> Response:
    """Go on with a conversation."""
    api.ignored.note(body, ignored_by_template(api, body))
    await api.look_for(body.model)
    job = await while_connected(request.receive, chat_job(api, body, context))
    return await answer(api, job, ChatWriter(api, job), request)


@router.post("/invocations", response_model=None)
async def invocations(request: Request, api: ApiOf, context: ContextOf) -> Response:
    """What SageMaker sends: a chat completion if the body has ``messages``, else a completion."""
    assert isinstance(request, StrictJsonRequest), "its route reads bodies strictly"
    value = await request.json()
    is_chat = isinstance(value, dict) and "messages" in value
    request.model = ChatBody if is_chat else CompletionBody
    body = await request.json()
    return await (chat_completions if is_chat else completions)(body, request, api, context)


_OF_TEMPLATES = (
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("tools", "reasoning_effort"),
)


class TokenizeBody(ConversationBody):
    """A text or a conversation whose tokens are asked for.

    Attributes:
        model: Absent, the target.
        add_special_tokens: Whether a text gets those that the tokenizer adds by itself; by default it does. A
            conversation has those of its template, and others only where it is asked for.
        return_token_strs: Send each token's own text too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    return_token_strs: bool | None = None

    def check_together(self) -> None:
        """Refuse both, and neither, and what would be ignored.

        Raises:
            InvalidParameterError: It is not one of ``prompt`` and ``messages``, or a field goes with the other.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameterError("prompt", "send either prompt or messages")
        self.check_template()
        for name in _OF_TEMPLATES:
            if self.prompt is not None and getattr(self, name) is not None:
                raise InvalidParameterError(name, f"{name} needs messages; a prompt has no template")


class DetokenizeBody(Body):
    """Tokens whose text is asked for; absent, ``model`` is the target."""

    model: str | None = None
    tokens: TokenList


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, api: ApiOf) -> Response:
    """The tokens of a text or a conversation."""
    api.ignored.note(body)
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

    return await api.write(count, write)


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, api: ApiOf) -> Response:
    """The text of tokens, special ones included."""
    api.ignored.note(body)
    await api.look_for(body.model)
    model = api.model(body.model)

    def write() -> Response:
        if body.tokens:
            check_token_ids(body.tokens, model.vocab_size, "tokens")
        return JSONResponse({"prompt": api.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)})

    return await api.write(len(body.tokens), write)


async def _tokens(api: Api, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        return await conversation_tokens(api, body.messages, body)
    text, add_special = body.prompt or "", body.add_special_tokens is not False
    tokens: list[int] = await api.encode(len(text), lambda: api.tokenizer.encode(text, add_special_tokens=add_special))
    return tokens
