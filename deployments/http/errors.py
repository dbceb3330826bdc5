"""Everything that can go wrong, as OpenAI's clients expect it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from specdec.core.errors import (
    InvalidParameterError,
    SequenceFailedError,
    ServiceUnavailableError,
    UnsupportedParameterError,
)

_logger = logging.getLogger("ray.serve")

UNSUPPORTED = "unsupported_parameter"
INVALID = "invalid_value"
_UNION_LABELS = frozenset({"str", "int", "float", "bool", "dict", "list"})
"""Pydantic's for the members of a union; labels of ours begin with ``<``."""
_MOST_SHOWN = 64
"""Characters of a field's name."""


_CLIENT_CLOSED_REQUEST = 499


class ClientGoneError(Exception):
    """The client has closed its connection."""


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        kind: The body's ``type``.
        param: The parameter it is about, if it is about one.
        code: Stable and machine-readable, or None.
        headers: To send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return _ErrorResponse(self)


class _ErrorResponse(JSONResponse):
    """Notes the error's code for whoever counts errors."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body, error.status, error.headers)
        self._code = error.code or error.kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["error_code"] = self._code
        await super().__call__(scope, receive, send)


def api_error(error: Exception, retry_after_s: int, request_id: str) -> ApiError:
    """The answer to any exception; what we did not foresee is logged, and not shown to the client."""
    match error:
        case ApiError():
            return error
        case InvalidParameterError():
            default = UNSUPPORTED if isinstance(error, UnsupportedParameterError) else INVALID
            return ApiError(400, str(error), param=error.parameter, code=error.code or default)
        case ServiceUnavailableError():
            headers = {"Retry-After": str(retry_after_s)}
            return ApiError(
                503,
                str(error) or "no worker is ready; /health says what is missing",
                "server_error",
                None,
                "service_unavailable",
                headers,
            )
        case SequenceFailedError():
            _logger.warning("request %s: a sequence failed, and the client gets an error: %s", request_id, error)
            # OpenAI's clients send again what has a status of 500 and more: this would fail again, and cost others.
            headers = {"Retry-After": str(retry_after_s)} if error.is_passing else {"x-should-retry": "false"}
            status = 503 if error.is_passing else 500
            return ApiError(status, str(error), "server_error", code=error.code, headers=headers)
        case RequestValidationError():
            return _invalid_body(error.errors())
        case HTTPException():
            return _http_error(error)
    _logger.error("request %s failed with an internal error, and the client gets a 500", request_id, exc_info=error)
    return ApiError(
        500,
        f"internal error; the ingress' log has its traceback under {request_id}",
        "server_error",
        code="internal_error",
    )


def add_error_handlers(app: FastAPI, retry_after_s: int) -> None:
    """Answer every exception a route may raise with OpenAI's error object."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            return _no_such_route(request, error).response()
        return api_error(error, retry_after_s, request.state.context.label).response()

    async def nobody_listens(_request: Request, _error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGoneError, nobody_listens)
    for kind in (ApiError, InvalidParameterError, ServiceUnavailableError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def _no_such_route(request: Request, error: HTTPException) -> ApiError:
    """No such path, or not with that method."""
    path = request.url.path
    if error.status_code == 404:
        return ApiError(404, f"there is no {path}; GET /openapi.json lists what there is", code="unknown_url")
    headers = dict(error.headers or {})
    return ApiError(405, f"{request.method} is not allowed on {path}", code="method_not_allowed", headers=headers)


def _http_error(error: HTTPException) -> ApiError:
    """An error of the framework itself, such as a body that could not be read."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = {408: "body_timeout", 413: "request_too_large"}.get(error.status_code)
    return ApiError(error.status_code, str(error.detail), kind, code=code, headers=dict(error.headers or {}))


def _invalid_body(errors: Sequence[Any]) -> ApiError:
    """The first thing that is wrong with a body, with the name of the field."""
    first = errors[0]
    path = [part for part in first["loc"][1:] if part not in _UNION_LABELS and not str(part).startswith("<")]
    if "field" in first.get("ctx", {}):
        path.append(first["ctx"]["field"])
    param = dotted(path) if path else None
    if param is None:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    match first["type"]:
        case "missing":
            return ApiError(400, f"{param} is required", param=param, code="missing_required_parameter")
        case "unsupported_parameter" | "refused_field":
            return ApiError(400, f"{param} {first['msg']}", param=param, code=UNSUPPORTED)
    return ApiError(400, f"{param}: {_lower_first(first['msg'])}", param=param, code=INVALID)


def dotted(path: Sequence[str | int]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``; names that clients invent are cut."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_MOST_SHOWN]}" for part in path)
    return text.removeprefix(".")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
