"""What stands in front of Serve's HTTP proxy: it notes when a request came, as the ingress may hear of it much later.

Serve finds it by the variable ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``. Every proxy imports it as it starts, so it
imports nothing that is slow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

ARRIVED = "x-specdec-arrived"
"""The header: seconds since the epoch. A client's own is taken away."""
_TRACE = ("traceparent", "tracestate")


class StampArrival:
    """Gives every request the header.

    Args:
        app: What stands behind it.
        removed: Headers of clients that nobody behind it sees.
    """

    def __init__(self, app: ASGIApp, removed: Sequence[str] = ()) -> None:
        self._app = app
        self._removed = {name.encode() for name in (ARRIVED, *removed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            headers = [header for header in scope["headers"] if header[0] not in self._removed]
            scope = {**scope, "headers": [*headers, (ARRIVED.encode(), repr(time.time()).encode())]}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """For Serve."""
    return [Middleware(StampArrival)]


def own_traces_only() -> list[Middleware]:
    """For Serve, where ``tracing.trust_traceparent`` is off."""
    return [Middleware(StampArrival, removed=_TRACE)]
