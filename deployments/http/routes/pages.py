"""``GET /``, ``/docs``, ``/version`` and ``/ping``: for people, and for probes of other servers' habits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, HTMLResponse

import specdec
from deployments.http.context import ApiOf

router = APIRouter()
_PAGE = Path(__file__).parent.parent / "docs.html"


@router.get("/")
async def root(api: ApiOf) -> dict[str, Any]:
    """What this is, and where to go on. It answers without a key, so it names no adapters: those are tenants' own."""
    models = [model.name for model in api.service.model_info().base_models]
    known = {"name": "specdec", "version": specdec.__version__, "models": models, "docs": "/docs"}
    return known | ({"ui": "/ui"} if api.settings.ui else {})


@router.get("/version")
async def version() -> dict[str, str]:
    """The program's version."""
    return {"version": specdec.__version__}


@router.get("/ping")
@router.post("/ping")
async def ping(api: ApiOf) -> Response:
    """200 while requests can be served, else 503; what SageMaker asks."""
    api.service.check_health()
    return Response()


@router.get("/docs", response_class=HTMLResponse)
async def docs() -> FileResponse:
    """The API's own description, as a page that loads nothing but ``/openapi.json``."""
    return FileResponse(_PAGE, headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"})
