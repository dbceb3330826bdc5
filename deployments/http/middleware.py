"""What stands around every route: arrivals and their log, limits before a body is read, the last net for errors."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from contextlib import suppress
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.admission import Admission
from deployments.http.errors import ApiError, api_error
from deployments.http.keys import is_open
from deployments.http.observer import Observer
from deployments.http.request_context import RequestContext, RequestStats
from deployments.http.service import ApiSettings
from deployments.metrics.spans import RequestSpan
from deployments.proxy import ARRIVED

logger = logging.getLogger("ray.serve")

_CLOSE = {"Connection": "close"}
"""With an answer to a body that was not read to its end."""
_DRAINED_BODIES = 16
_DRAIN_S = 2.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_STORED = "/v1/responses/"
"""Below it is what clients said: who reads and deletes it is logged."""
_TIMEOUT_HEADER = "x-request-timeout-seconds"
_MOST_WAITED_S = 300.0
"""Of a longer wait at Serve's proxy the cause is more likely that clocks differ."""
_SERVES_HEAD_START_S = 0.5
"""So long before Serve's proxy would cut a request off, it is answered here."""


class TrackRequests:
    """Gives every request an id, the client's where it sends a usable one, and its deadlines; logs it at its end.

    The id is that of ``x-request-id``, and is sent back in it.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings, observer: Observer) -> None:
        self._app = app
        self._settings = settings
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, tracer = Headers(scope=scope), self._settings.tracer
        is_work = scope["method"] == "POST" and not is_open(scope)
        is_logged = is_work or _STORED in scope["path"]
        span = RequestSpan(tracer, headers) if tracer is not None and is_work else None
        context = self._context(headers, "" if span is None else span.label)
        scope.setdefault("state", {})["context"] = context
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._settings.send_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = context.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "none")  # of what was refused before it was looked for
            self._observer.answered(route, status, scope["state"].get("error_code", ""))
            if is_logged:
                fields = _log(context, scope["method"], quote(scope["path"]), status)
                if span is not None:
                    stats = context.stats
                    phases = {"queue": context.clock_s, "prompt": stats.admitted_s, "stream": stats.first_token_s}
                    span.end(phases, fields)

    def _context(self, headers: Headers, trace: str) -> RequestContext:
        settings, now_s = self._settings, time.monotonic()
        given = headers.get("x-request-id", "")
        timeouts_s = [
            settings.limits.request_timeout_s or math.inf,
            _wanted_timeout_s(headers.get(_TIMEOUT_HEADER, "")),
        ]
        return RequestContext(
            request_id=given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
            clock_s=now_s,
            waited_s=_waited_s(headers.get(ARRIVED, "")),
            wall_s=time.time(),
            caller=_caller(headers.get("authorization", "")),
            share_prefixes=settings.share_prefixes,
            begin_by_s=now_s + settings.limits.queue_timeout_s,
            patience_s=settings.limits.queue_timeout_s,
            end_by_s=now_s + min(timeouts_s),
            retry_after_s=settings.limits.retry_after_s,
            trace=trace,
        )


def _caller(authorization: str) -> str:
    """A digest of who calls; the scheme's case and spaces around the key make nobody another."""
    scheme, _, key = authorization.partition(" ")
    own = f"Bearer {key.strip()}" if scheme.lower() == "bearer" else authorization
    return blake2b(own.encode(), digest_size=16).hexdigest() if own else ""


def _waited_s(stamp: str) -> float:
    """How long ago Serve's proxy had a request, by its stamp; 0 where there is none, or clocks differ."""
    try:
        waited_s = time.time() - float(stamp)
    except ValueError:
        return 0.0
    return waited_s if 0 < waited_s < _MOST_WAITED_S else 0.0


def _wanted_timeout_s(header: str) -> float:
    """How long a request may take by its header; as to Serve, what is no number above 0 says nothing."""
    try:
        wanted_s = float(header)
    except ValueError:
        return math.inf
    if not wanted_s > 0:
        return math.inf
    return wanted_s - min(_SERVES_HEAD_START_S, wanted_s / 2)


def _log(context: RequestContext, method: str, path: str, status: int) -> dict[str, Any]:
    """One line of a request, with figures as fields, which it returns: in JSON where the log is JSON."""
    stats, now_s = context.stats, time.monotonic()
    first_s = None if stats.first_token_s is None else round(stats.first_token_s - context.clock_s, 4)
    fields = {
        "request_id": context.label,
        "key": stats.key,
        "model": stats.model,
        "method": method,
        "path": path,
        "status": status,
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_completion_tokens,
        "time_to_first_token_s": first_s,
        "duration_s": round(now_s - context.clock_s, 4),
        "finish": ",".join(stats.finish),
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
    }
    logger.info("request %s", " ".join(f"{name}={value}" for name, value in fields.items()), extra={"request": fields})
    return fields


class CatchErrors:
    """Answers what nothing else did answer, with 500 where it was not foreseen; an answer that has begun is cut off."""

    def __init__(self, app: ASGIApp, retry_after_s: int) -> None:
        self._app = app
        self._retry_after_s = retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            context: RequestContext = scope["state"]["context"]
            await api_error(error, self._retry_after_s, context.label).response()(scope, receive, send)


class Admit:
    """Takes requests with a body in, or refuses them, before anything of the body is read."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or is_open(scope):
            await self._app(scope, receive, send)
            return
        stats = scope["state"]["context"].stats
        declared = declared_bytes(scope)
        stats.reservation = self._admission.enter(stats.key, declared or 0)
        try:
            await self._app(scope, receive, send)
        finally:
            stats.reservation.leave()


def declared_bytes(scope: Scope) -> int | None:
    """How long a body says that it is; None where it does not say."""
    declared = Headers(scope=scope).get("content-length", "")
    if not declared.isdecimal():
        return None
    return int(declared) if len(declared) <= 18 else 1 << 62


class BodyLimit:
    """Refuses bodies over a limit, by their declared length or while they are read, and those that come too slowly.

    Starlette's own limit answers in plain text. A client that is still sending would lose an answer that comes with the
    end of its connection, so a part of the rest of a refused body is read, and forgotten, before that.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context: RequestContext = scope["state"]["context"]
        until_s = min(context.clock_s + self._timeout_s, context.end_by_s)
        declared = declared_bytes(scope)
        limited = _LimitedBody(
            receive, send, self._max_body_bytes, until_s, context.stats, is_declared=declared is not None
        )
        if declared is not None and declared > self._max_body_bytes:
            error = ApiError(413, limited.message, code="request_too_large", headers=_CLOSE)
            await error.response()(scope, limited.receive, limited.send)
        else:
            await self._app(scope, limited.receive, limited.send)


class _LimitedBody:
    """One request's messages.

    Args:
        receive: Gives the client's messages.
        send: Takes the answer's.
        max_bytes: Of the body.
        until_s: When all of it must have come, monotonic.
        stats: Its reservation counts how long the body is.
        is_declared: Whether the client has said how long it is, so that all of it is counted already.
    """

    def __init__(
        self, receive: Receive, send: Send, max_bytes: int, until_s: float, stats: RequestStats, is_declared: bool
    ) -> None:
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._until_s = until_s
        self._stats = stats
        self._is_declared = is_declared
        self._num_bytes = 0
        self._is_read = False
        self._is_refused = False
        self.message = f"the body is over {max_bytes} bytes (limits.max_body_bytes)"

    async def receive(self) -> Message:
        """The next message; raises 413 beyond the limit, and 408 where the body is not there in time."""
        if self._is_read:
            return await self._receive()
        rest_s = None if self._until_s == math.inf else max(self._until_s - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(rest_s):
                message = await self._next()
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time (limits.body_timeout_s)", _CLOSE) from None
        if self._num_bytes > self._max_bytes:
            raise HTTPException(413, self.message, _CLOSE)
        return message

    async def _next(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self._is_read = not message.get("more_body")
        if self._stats.reservation is not None and not self._is_refused and (self._is_read or not self._is_declared):
            self._stats.reservation.body_came(self._num_bytes)
        return message

    async def send(self, message: Message) -> None:
        """Send on; the end of a refusal waits for the client to have sent its body, or most of it."""
        if message["type"] == "http.response.start":
            self._is_refused = message["status"] >= 400 and not self._is_read
        elif self._is_refused and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drain(self) -> None:
        limit = self._num_bytes + _DRAINED_BODIES * self._max_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while self._num_bytes < limit and not self._is_read:
                    await self._next()
