"""What stands around every route: request ids, the body's limit, and the last net for errors."""

from __future__ import annotations

import asyncio
import re
import uuid
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai.errors import ApiError, api_error

_CLOSE = {"Connection": "close"}
"""With an answer to a body that was not read to its end."""
_DRAINED_BODIES = 4
_DRAIN_S = 2.0
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

    Starlette's own limit answers in plain text. A client that is still sending would lose an answer that comes with the
    end of its connection, so a part of the rest is read, and forgotten, before that.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limited = _LimitedBody(receive, send, self._max_body_bytes)
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._max_body_bytes):
            limited.refused = True
            error = ApiError(413, limited.message, code="request_too_large", headers=_CLOSE)
            await error.response()(scope, limited.receive, limited.send)
        else:
            await self._app(scope, limited.receive, limited.send)


class _LimitedBody:
    """One request's messages.

    Attributes:
        refused: Whether the body is over the limit.
    """

    def __init__(self, receive: Receive, send: Send, max_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.refused = False
        self.message = f"the body is over the limit of {max_bytes} bytes"

    async def receive(self) -> Message:
        """The next message; raises 413 beyond the limit."""
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            self.refused = True
            raise HTTPException(413, self.message, _CLOSE)
        return message

    async def send(self, message: Message) -> None:
        """Send on; the end of a refusal waits for the client to have sent its body, or most of it."""
        if self.refused and message["type"] == "http.response.body" and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drain(self) -> None:
        limit = self._num_bytes + _DRAINED_BODIES * self._max_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while self._num_bytes < limit:
                    message = await self._receive()
                    self._num_bytes += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return
