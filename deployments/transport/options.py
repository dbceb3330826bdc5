"""Deployment options that links need, with the reasons."""

from __future__ import annotations

from typing import Any

from ray.serve.config import RequestRouterConfig

PINNING_REQUEST_ROUTER = "deployments.transport.pinning:PinningRequestRouter"


def pinned_options() -> dict[str, Any]:
    """Options of a deployment that is called by replica id: draft, target and router; not the ingress.

    Streams are those of the links that have no socket.

    - ``max_ongoing_requests``: every open stream counts as a request for as long as it lives. A worker has one per
      router, a router one per worker and ingress, and a call in flight per ingress. Serve's default of 5 would leave
      later ones waiting; 10000 is never reached.
    - ``health_check_period_s``: a replica that died is replaced within about a second; Serve's default is 10.
    - ``health_check_timeout_s``: a health check that does not answer is failed after this; three in a row replace.
    - ``graceful_shutdown_wait_loop_s``: a replica that is to stop sleeps so long before it first looks whether its
      requests have ended (default 2).
    - ``graceful_shutdown_timeout_s``: streams end by themselves as soon as the replica is to stop; nothing to wait for.
    """
    return {
        "max_ongoing_requests": 10_000,
        "max_queued_requests": -1,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": 5.0,
        "request_router_config": RequestRouterConfig(request_router_class=PINNING_REQUEST_ROUTER),
    }
