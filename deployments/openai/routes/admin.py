"""``GET /health`` and ``GET /metrics``."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from deployments.openai.context import ApiOf

router = APIRouter()


@router.get("/health")
async def health(api: ApiOf) -> Response:
    """200 while requests can be served, else 503."""
    await api.service.check_health()
    return Response()


@router.get("/metrics")
async def metrics(api: ApiOf) -> Response:
    """All metrics of the service, for Prometheus."""
    return Response(await api.service.metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})
