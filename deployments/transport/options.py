"""Deployment options that links need, with the reasons."""

from __future__ import annotations

from typing import Any

from ray.serve.config import RequestRouterConfig

PINNING_REQUEST_ROUTER = "deployments.transport.pinning:PinningRequestRouter"


def pinned_options(graceful_shutdown_timeout_s: float = 30.0) -> dict[str, Any]:
    """Options of draft, target and router; not of the ingress.

    - ``max_ongoing_requests``: a link over Serve's streams counts as a request for as long as it lives. Serve's default
      of 5 would leave later ones waiting; 10000 is never reached.
    - ``health_check_period_s``: a replica that died is replaced within about a second; Serve's default is 10.
    - ``health_check_timeout_s``: a health check that does not answer is failed after this; three in a row replace.
    - ``graceful_shutdown_wait_loop_s``: a replica that is to stop sleeps so long before it first looks whether its
      requests have ended (default 2).

    Args:
        graceful_shutdown_timeout_s: Longest drain of a replica that is to stop; then it is killed.
    """
    return {
        "max_ongoing_requests": 10_000,
        "max_queued_requests": -1,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": graceful_shutdown_timeout_s,
        "request_router_config": RequestRouterConfig(request_router_class=PINNING_REQUEST_ROUTER),
    }
