"""Nothing is recorded, and nobody is told, unless the operator asks for it."""

from __future__ import annotations

import httpx

from tests.integration.running import RunningService


def test_there_is_no_trace_by_default(service: RunningService) -> None:
    assert httpx.get(f"{service.url}/debug/trace", timeout=30).status_code == 404
    assert httpx.get(f"{service.url}/health", timeout=30).status_code == 200
