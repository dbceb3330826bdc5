"""The HTTP application; it knows nothing of where the tokens come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from deployments.openai.context import Api
from deployments.openai.errors import add_error_handlers
from deployments.openai.ignored import IgnoredFields
from deployments.openai.middleware import BodyLimit, CatchErrors, RequestIds
from deployments.openai.observer import Observer, PrometheusObserver
from deployments.openai.routes import admin, completions, models, pages, tokens
from deployments.openai.service import TokenService
from deployments.openai.settings import ApiSettings
from specdec.text.pieces import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def create_app(
    service: TokenService,
    settings: ApiSettings,
    tokenizer: PreTrainedTokenizerBase,
    observer: Observer | None = None,
) -> FastAPI:
    """Build the OpenAI-style API over a token service.

    Args:
        service: Generates the tokens.
        settings: What requests may ask for.
        tokenizer: The pair's, a fast one.
        observer: Told what happens to requests; by default nobody listens.
    """
    app = FastAPI(title="specdec", docs_url=None, redoc_url=None, redirect_slashes=False)
    observer = observer if observer is not None else PrometheusObserver(CollectorRegistry())
    ignored = IgnoredFields(settings.unknown_fields, observer)
    app.state.api = Api(service, tokenizer, settings, observer, TokenTexts(tokenizer), ignored)
    add_error_handlers(app, settings.retry_after_s)
    # The last one added stands outermost.
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(CatchErrors, retry_after_s=settings.retry_after_s)
    app.add_middleware(RequestIds, send_back=settings.send_request_id)
    for group in (completions, models, tokens, admin, pages):
        app.include_router(group.router)
    return app
