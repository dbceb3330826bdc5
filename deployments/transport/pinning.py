"""Calls to one replica, and the list of replicas, through Serve's request router.

Serve pickles this class by value into every process that has a handle, so this module must hold nothing that is shared.

Deployment options that links need, with the reasons.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.transport.discovery import process_board


class PinningRequestRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica that ``handle.options(session_id=replica_id)`` names.

    Calls without a session, or with one that names no live replica, go to the less busy of two random replicas. So a
    pinned call can reach another replica than the one meant: Serve offers no way to fail it here that does not leave
    a routing task behind, so the callee compares (see ``Hello``).
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One attempt: the pinned replica alone, or two others at most."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            meant = pending_request.metadata.session_id
            pinned = [r for r in candidate_replicas if r.replica_id.unique_id == meant]
            if pinned:
                return [pinned]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in Serve's new list."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that a call found dead, before Serve's controller knows."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        key = (self._deployment_id.app_name, self._deployment_id.name)
        process_board().publish(key, [replica_id.unique_id for replica_id in self.curr_replicas])


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
