"""``GET /health``; in the service an application of its own stands before it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from deployments.http.context import ApiOf

router = APIRouter()


@router.get("/health")
async def health(api: ApiOf) -> Response:
    """200 while requests can be served, else 503."""
    api.service.check_health()
    return Response()
