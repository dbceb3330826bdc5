"""API keys: several, each with a name, which is all that is ever shown of one."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.errors import ApiError

OPEN_PATHS = frozenset(
    {"/", "/docs", "/health", "/openapi.json", "/ping", "/ui", "/ui/ui.css", "/ui/ui.js", "/version"}
)
"""What answers without a key, wherever the application is mounted."""


def is_open(scope: Scope) -> bool:
    """Whether a request asks for what answers without a key."""
    root, path = scope.get("root_path", "").rstrip("/"), scope["path"]
    return (path.removeprefix(root) if f"{path}/".startswith(f"{root}/") else path) in OPEN_PATHS | {""}


class ApiKeys:
    """Who may call.

    Args:
        keys: By the names of those that have them; without any, everybody may call.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = {name: sha256(key.encode()).digest() for name, key in keys.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the keys."""
        return tuple(self._digests)

    def check(self, authorization: str) -> str:
        """The name of the key in an ``Authorization`` header; empty where none is asked for.

        Digests of equal length are compared, all of them and in constant time: how long it takes tells nothing.

        Raises:
            ApiError: 401: there is none, or it is wrong.
        """
        if not self._digests:
            return ""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise _unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY'")
        digest = sha256(given.strip().encode()).digest()
        names = [name for name, known in self._digests.items() if hmac.compare_digest(digest, known)]
        if not names:
            raise _unauthorized("the API key is wrong")
        return names[0]


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class CheckKeys:
    """Lets in who has a key, but for the paths that are open to all."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and not is_open(scope):
            scope["state"]["context"].stats.key = self._keys.check(Headers(scope=scope).get("authorization", ""))
        await self._app(scope, receive, send)
