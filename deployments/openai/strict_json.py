"""Request bodies, read strictly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from math import isfinite
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from deployments.openai.errors import INVALID, ApiError, dotted

_QUICK_BYTES = 1 << 16
"""Bodies up to this long are parsed on the event loop: it takes less than a millisecond."""


class StrictJsonRequest(Request):
    """A request whose JSON must be JSON: no NaN, no half surrogate pairs, no endless nesting."""

    async def json(self) -> Any:
        """The body as Python values.

        Raises:
            ApiError: It is JSON but for a NaN or an infinity, which is named.
            HTTPException: It is not valid JSON.
        """
        body = await self.body()
        try:
            if len(body) <= _QUICK_BYTES:
                return from_json(body, allow_inf_nan=False)
            return await asyncio.to_thread(from_json, body, allow_inf_nan=False)
        except ValueError as error:
            _refuse_infinite(body)
            raise HTTPException(400, f"the body is not valid JSON: {error}") from None


def _refuse_infinite(body: bytes) -> None:
    """Name the field of a NaN or an infinity, if there is nothing else wrong with a body."""
    try:
        value = from_json(body)
    except ValueError:
        return
    path = _path_of_infinite(value)
    if path is not None:
        param = dotted(path)
        raise ApiError(400, f"{param} must be a finite number: JSON has no NaN, no Infinity", param=param, code=INVALID)


def _path_of_infinite(value: Any) -> tuple[str | int, ...] | None:
    """Where the first number is that is none; the parser bounds the depth."""
    if isinstance(value, float):
        return None if isfinite(value) else ()
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        path = _path_of_infinite(part)
        if path is not None:
            return (key, *path)
    return None


class StrictJsonRoute(APIRoute):
    """A route that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a strict request."""
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            try:
                return await handler(StrictJsonRequest(request.scope, request.receive))
            except HTTPException as error:
                # FastAPI makes one of its own of every other error that reading a body raises.
                raise error.__cause__ if isinstance(error.__cause__, ApiError) else error from None

        return strict_handler
