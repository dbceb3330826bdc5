"""``GET /v1/models`` and ``GET /v1/models/{name}``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from deployments.http.context import ApiOf
from deployments.http.service import ServedModel

router = APIRouter(prefix="/v1")


@router.get("/models", response_model=None)
async def models(api: ApiOf) -> Response:
    """All models that requests can name."""
    info = api.service.model_info()
    others = (replace(info.target, name=name) for name in info.target.other_names)
    served = [*info.base_models, *others, *info.adapters.values()]

    def write() -> Response:
        return JSONResponse({"object": "list", "data": [_model(model, info.created_s) for model in served]})

    return await api.write(len(served), write)


@router.get("/models/{name:path}")
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
