"""Request bodies, read strictly."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException


class StrictJsonRequest(Request):
    """A request whose JSON must be JSON: no NaN, no half surrogate pairs, no endless nesting."""

    async def json(self) -> Any:
        """The body as Python values.

        Raises:
            HTTPException: It is not valid JSON.
        """
        body = await self.body()
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from None


class StrictJsonRoute(APIRoute):
    """A route that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a strict request."""
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            return await handler(StrictJsonRequest(request.scope, request.receive))

        return strict_handler
