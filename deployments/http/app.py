"""The HTTP application; it knows nothing of where the tokens come from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from deployments.http.admission import Admission
from deployments.http.answers import QUEUE
from deployments.http.api import Api
from deployments.http.errors import add_error_handlers
from deployments.http.ignored import IgnoredFields
from deployments.http.keys import ApiKeys, CheckKeys
from deployments.http.middleware import Admit, BodyLimit, CatchErrors, TrackRequests
from deployments.http.observer import Observer
from deployments.http.recordings import RecordingFolder
from deployments.http.routes import completions, pages, responses
from deployments.http.service import ApiSettings, TokenService
from deployments.http.store import Store
from deployments.http.untaken import queue_of
from specdec.checkpoint.compat import tokenizer_width
from specdec.structured.compiler import Grammars
from specdec.structured.parsing.selection import AnswerForms
from specdec.text.detokenizer import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Application(FastAPI):
    """Keeps with each request the queue of Serve's that holds its answer: what stands inside wraps ``send``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        scope.setdefault("state", {})[QUEUE] = queue_of(send)
        await super().__call__(scope, receive, send)


def create_app(
    service: TokenService,
    settings: ApiSettings,
    tokenizer: PreTrainedTokenizerBase,
    observer: Observer | None = None,
    keys: ApiKeys | None = None,
    admission: Admission | None = None,
    store: Store | None = None,
    grammars: Grammars | None = None,
    find_adapter: Callable[[str], Awaitable[None]] | None = None,
    recordings: RecordingFolder | None = None,
) -> FastAPI:
    """Build the OpenAI-style API over a token service.

    Args:
        service: Generates the tokens.
        settings: What requests may ask for.
        tokenizer: The pair's, a fast one.
        observer: Counts what happens to requests; by default nobody listens.
        keys: Who may call; by default everybody.
        admission: The book of an application that this one takes the place of, whose requests go on counting.
        store: Keeps responses; by default nothing is kept.
        grammars: Of :func:`request_grammars`, which are made by default.
        find_adapter: Looks for an adapter that is not known here.
        recordings: Keeps answers as recordings; by default none are kept.
    """
    # FastAPI's own spans would stand between Serve's and ours, and its counters beside ours.
    telemetry: Any = {"tracing": False, "metrics": False, "logs": False}
    app = _Application(title="specdec", docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=telemetry)
    observer = observer if observer is not None else Observer(CollectorRegistry())
    ignored = IgnoredFields(settings.unknown_fields, observer)
    if grammars is None:
        grammars = request_grammars(tokenizer)
    answers = AnswerForms(tokenizer, settings.tool_parser, settings.reasoning_tags)
    texts = TokenTexts(tokenizer)
    app.state.api = Api(
        service, tokenizer, settings, observer, texts, ignored, grammars, answers, store, find_adapter, recordings
    )
    add_error_handlers(app, settings.limits.retry_after_s)
    if admission is None:
        admission = Admission(settings.limits)
    admission.set_limits(settings.limits)
    # The last one added stands outermost.
    app.add_middleware(Admit, admission=admission)
    app.add_middleware(CheckKeys, keys=keys or ApiKeys({}))
    app.add_middleware(CatchErrors, retry_after_s=settings.limits.retry_after_s)
    max_body_bytes = settings.limits.body_bytes(service.model_info().target.max_model_len)
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes, timeout_s=settings.limits.body_timeout_s)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-should-retry", "x-specdec-warning"],
        )
    app.add_middleware(TrackRequests, settings=settings, observer=observer)
    for router in (completions.router, responses.router, pages.router, *((pages.ui_router,) if settings.ui else ())):
        app.include_router(router)
    return app


def request_grammars(tokenizer: PreTrainedTokenizerBase) -> Grammars:
    """What compiles the grammars of requests, its tables made; applications that follow each other have one."""
    eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return Grammars(tokenizer, tokenizer_width(tokenizer), eos_token_ids, tries_first=True)
