"""Request bodies, read strictly, and large ones where nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from math import isfinite
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from deployments.http.api import api_of
from deployments.http.errors import INVALID, ApiError, dotted

_QUICK_BYTES = 1 << 14
"""Bodies up to this long are parsed and checked on the event loop: a thread would cost more."""
_MOST_PARTS = 1 << 14
"""Fields of one body, those of the objects in it included; and lists and objects in it."""
_MOST_STRINGS = 1 << 16
"""Of one body, names of fields included."""
_FLOAT_OR_MORE = (float, dict, list)


class StrictJsonRequest(Request):
    """A request whose JSON must be JSON: no NaN, no half surrogate pairs, no endless nesting, no mass of parts.

    Attributes:
        model: What the body must be, if that is known.
    """

    model: type[BaseModel] | None = None

    async def json(self) -> Any:
        """The body as Python values, or as what it must be.

        Raises:
            ApiError: It is JSON but for a NaN or a number beyond all floats, which is named; or it has too many parts.
            HTTPException: It is not valid JSON.
            RequestValidationError: It is not what it must be.
        """
        body = await self.body()
        if len(body) <= _QUICK_BYTES:
            return self._read(body)
        return await api_of(self).beside_loop(lambda: self._read(body))

    def _read(self, body: bytes) -> Any:
        _check_parts(body)
        value = _parsed(body)
        if self.model is None:
            return value
        try:
            return self.model.model_validate(value)  # FastAPI takes it as it is
        except ValidationError as error:
            errors = error.errors(include_url=False)
            raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in errors]) from None


def _check_parts(body: bytes) -> None:
    """Bound what a body has outside its strings before a parser makes an object of each.

    A parser keeps the interpreter's lock to its end: hundreds of milliseconds for a million of empty lists.
    """
    if body.count(b'"') <= 2 * _MOST_STRINGS and all(
        body.count(sign) <= _MOST_PARTS // 2 for sign in (b":", b"[", b"{")
    ):
        return
    # Without what a backslash stands before, every second piece between quotes is outside of strings.
    pieces = body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', 2 * _MOST_STRINGS + 1)
    outside = b"".join(pieces[::2])
    for most, count, what in (
        (_MOST_STRINGS, len(pieces) // 2, "strings"),
        (_MOST_PARTS, outside.count(b":"), "fields"),
        (_MOST_PARTS, outside.count(b"[") + outside.count(b"{"), "lists and objects"),
    ):
        if count > most:
            raise ApiError(400, f"the body must have at most {most} {what}", code=INVALID)


def _parsed(body: bytes) -> Any:
    """The body as Python values, all numbers finite, by the parser that keeps the lock for the shortest time."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # the other parser says where it is wrong, and reads numbers that are to be named
    try:
        value = from_json(body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from None
    _refuse_infinite(value)
    return value


def _refuse_infinite(value: Any) -> None:
    """Name the field of a NaN or an infinity, which a number beyond all floats has become, too."""
    path = _path_of_infinite(value)
    if path is not None:
        param = dotted(path)
        text = f"{param or 'the body'} must be a finite number, of at most 1.7e308: JSON has no NaN, no Infinity"
        raise ApiError(400, text, param=param or None, code=INVALID)


def _path_of_infinite(value: Any) -> tuple[str | int, ...] | None:
    """Where the first number is that is none; the parser bounds the depth."""
    if isinstance(value, float):
        return None if isfinite(value) else ()
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        path = _path_of_infinite(part) if isinstance(part, _FLOAT_OR_MORE) else None  # many are token ids
        if path is not None:
            return (key, *path)
    return None


class StrictJsonRoute(APIRoute):
    """A route that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a strict request."""
        handler = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def strict_handler(request: Request) -> Response:
            strict = StrictJsonRequest(request.scope, request.receive)
            strict.model = model
            try:
                return await handler(strict)
            except HTTPException as error:
                # FastAPI makes one of its own of every other error that reading a body raises.
                is_ours = isinstance(error.__cause__, ApiError | RequestValidationError)
                raise error.__cause__ if is_ours and error.__cause__ is not None else error from None

        return strict_handler
