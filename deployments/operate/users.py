"""Whether users wait, as the ingresses see it: for the autoscaling of what is behind them."""

from __future__ import annotations

from typing import Any

from ray import serve

from deployments.names import INGRESS
from deployments.operate.readiness import ReplicaPoll

_FRESH_S = 1.0


def users_poll() -> ReplicaPoll:
    """Asks every ingress of this replica's application, at most once a second."""
    return ReplicaPoll(_ingresses, "users_wait", _FRESH_S)


async def users_load(poll: ReplicaPoll) -> dict[str, float]:
    """The part of a replica's load that only ingresses know: ``users_wait``, 1 where users of any ingress wait."""
    return {"users_wait": max(await poll.get(), default=0.0)}


def _ingresses() -> Any:
    return serve.get_deployment_handle(INGRESS, serve.get_replica_context().app_name)
