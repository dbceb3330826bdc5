"""``/``, ``/docs`` and ``/ui`` for people; ``/version``, ``/ping``, ``/health`` and ``/v1/models`` for programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

import specdec
from deployments.http.api import ApiOf
from deployments.http.service import ServedModel

router = APIRouter()
_PAGE = Path(__file__).parent.parent / "docs.html"


@router.get("/")
async def root(api: ApiOf) -> dict[str, Any]:
    """What this is, and where to go on. It answers without a key, so it names no adapters: those are tenants' own."""
    name = api.service.model_info().target.name
    known = {"name": "specdec", "version": specdec.__version__, "models": [name], "docs": "/docs"}
    return known | ({"ui": "/ui"} if api.settings.ui else {})


@router.get("/version")
async def version() -> dict[str, str]:
    """The program's version."""
    return {"version": specdec.__version__}


@router.get("/ping")
@router.post("/ping")
async def ping(api: ApiOf) -> Response:
    """200 while a target computes requests, else 503; what SageMaker asks."""
    await api.service.check_ready()
    return Response()


@router.get("/docs", response_class=HTMLResponse)
async def docs() -> FileResponse:
    """The API's own description, as a page that loads nothing but ``/openapi.json``."""
    return FileResponse(_PAGE, headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"})


@router.get("/health")
async def health(api: ApiOf) -> Response:
    """200 while a target computes requests, else 503."""
    await api.service.check_ready()
    return Response()


@router.get("/v1/models", response_model=None)
async def models(api: ApiOf) -> Response:
    """All models that requests can name."""
    info = api.service.model_info()
    others = (replace(info.target, name=name) for name in info.target.other_names)
    served = [info.target, *others, *info.adapters.values()]

    def write() -> Response:
        return JSONResponse({"object": "list", "data": [_model(model, info.created_s) for model in served]})

    return await api.write(len(served), write)


@router.get("/v1/models/{name:path}")
async def model(name: str, api: ApiOf) -> dict[str, Any]:
    """One of them."""
    await api.look_for(name)
    return _model(api.model(name), api.service.model_info().created_s)


def _model(model: ServedModel, created_s: int) -> dict[str, Any]:
    root = Path(model.root)  # of a folder only its name: where it lies is nobody's business
    return {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "specdec",
        "max_model_len": model.max_model_len,
        "root": (root.name if root.is_absolute() else model.root) or model.name,
        "parent": model.parent,
    }


ui_router = APIRouter(include_in_schema=False)
"""Of the page on which one sees how an answer comes about."""
_FOLDER = Path(__file__).parent.parent / "ui"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
UI_PATHS = {
    "/ui": ("index.html", "text/html"),
    "/ui/ui.js": ("ui.js", "text/javascript"),
    "/ui/ui.css": ("ui.css", "text/css"),
}
"""The page's parts: where each is, in which file, and of what kind."""


def _serve(path: str, file: str, kind: str) -> None:
    @ui_router.get(path)
    async def part() -> FileResponse:
        return FileResponse(_FOLDER / file, media_type=kind, headers=_HEADERS)


for _path, (_file, _kind) in UI_PATHS.items():
    _serve(_path, _file, _kind)
