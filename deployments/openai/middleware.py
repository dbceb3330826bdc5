"""What stands around every route: request ids, the body's limit, and the last net for errors."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai.errors import ApiError, api_error

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Gives every request an id, the client's ``x-request-id`` where it sends a usable one, and sends it back."""

    def __init__(self, app: ASGIApp, send_back: bool) -> None:
        self._app = app
        self._send_back = send_back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id if self._send_back else send)


class CatchErrors:
    """Answers 500 where nothing else did; an answer that has begun is cut off."""

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
            await api_error(error, self._retry_after_s).response()(scope, receive, send)


class BodyLimit:
    """Refuses bodies over a limit, by their declared length or while they are read.

    Starlette's own limit answers in plain text.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the body is over the limit of {self._max_body_bytes} bytes"
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._max_body_bytes):
            await ApiError(413, message, code="request_too_large").response()(scope, receive, send)
            return
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            received = await receive()
            num_bytes += len(received.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, message)
            return received

        await self._app(scope, limited_receive, send)
