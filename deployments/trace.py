"""``GET /debug/trace``: what the workers have recorded; only there where the configuration has ``trace``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from pydantic import TypeAdapter

from specdec.engine.trace import WorkerTrace

_PATIENCE_S = 30.0
_TRACES = TypeAdapter(list[WorkerTrace])


def add_trace_route(app: FastAPI, router: Any) -> None:
    """Answer with the traces of all routers and of the workers they have links to, as JSON.

    Args:
        app: Gets the route.
        router: Handle of the routers.
    """

    @app.get("/debug/trace")
    async def trace() -> Response:
        answers = await router.broadcast("all_recorded").results_async(timeout_s=_PATIENCE_S)
        traces = {trace.name: trace for answer in answers for trace in answer}
        return Response(_TRACES.dump_json(list(traces.values())), media_type="application/json")
