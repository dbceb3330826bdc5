"""Which replicas of a deployment are live, and a handle to them.

Calls to one replica, and the list of replicas, through Serve's request router.

Serve pickles this class by value into each process that has a handle, but ``process_board`` by name, so they share it.

Deployment options that links need, with the reasons.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.transport.wire import LinkError

logger = logging.getLogger("ray.serve")

RETRY_S = 0.5
ReplicaListener = Callable[[frozenset[str]], None]
DeploymentKey = tuple[str, str]
"""Application and deployment name."""


class ReplicaBoard:
    """The latest replica ids of each deployment, their listeners, and which replicas have links. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[bytes, str] = {}
        self._listed: dict[DeploymentKey, frozenset[str]] = {}
        self._listeners: dict[DeploymentKey, list[ReplicaListener]] = defaultdict(list)

    def publish(self, key: DeploymentKey, replicas: Iterable[str]) -> None:
        """Take in a complete list; listeners are called on this thread if it is news, and must not block."""
        replica_ids = frozenset(replicas)
        with self._lock:
            is_news = self._listed.get(key) != replica_ids
            self._listed[key] = replica_ids
            listeners = list(self._listeners[key]) if is_news else []
        for listener in listeners:
            listener(replica_ids)

    def subscribe(self, key: DeploymentKey, listener: ReplicaListener) -> None:
        """Call ``listener`` with the list known so far, if any, and with every later one."""
        with self._lock:
            self._listeners[key].append(listener)
            known = self._listed.get(key)
        if known is not None:
            listener(known)

    def hold(self, link: bytes, replica: str) -> None:
        """Keep a replica reachable until this link ends, even if Serve stops listing it."""
        with self._lock:
            self._held[link] = replica

    def release(self, link: bytes) -> None:
        """Forget a link that has ended. Idempotent."""
        with self._lock:
            self._held.pop(link, None)

    def held(self) -> frozenset[str]:
        """Return the replicas that have a link."""
        with self._lock:
            return frozenset(self._held.values())


@functools.cache
def process_board() -> ReplicaBoard:
    """The board of this process: Serve makes request routers by itself, and takes no object to hand them."""
    return ReplicaBoard()


class Discovery:
    """Watches one deployment, which must have the ``PinningRequestRouter``.

    Event driven: Serve's controller pushes the list of running replicas to every handle, as soon as it knows
    of a change. A replica that is shutting down is not listed any more.

    Args:
        deployment: Name of the deployment; it may come into being later.
        app_name: Name of its application.
        on_change: Called on the event loop with all live replica ids, now and at every change.
    """

    def __init__(self, deployment: str, app_name: str, on_change: ReplicaListener) -> None:
        self._key = (app_name, deployment)
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._handle: DeploymentHandle | None = None
        self._is_closed = False
        # Serve takes calls made in a request's context for a part of that request, and cancels them with it.
        self._starting = self._loop.create_task(self._start(), context=contextvars.Context())

    def pinned(self, method: str, replica: str, *, stream: bool) -> DeploymentHandle:
        """A handle to one method, which takes and gives bytes, of one replica.

        Raises:
            LinkError: Serve has not been asked for a handle successfully yet.
        """
        if self._handle is None:
            raise LinkError(f"no handle to the deployment {self._key[1]} yet")
        return self._handle.options(method_name=method, session_id=replica, stream=stream)

    def close(self) -> None:
        """Stop watching; ``on_change`` is not called any more."""
        self._is_closed = True
        self._starting.cancel()

    async def _start(self) -> None:
        app_name, deployment = self._key
        logged = ""
        while self._handle is None:
            try:
                # A copy with options has its request router already; a bare handle gets one with its first call.
                self._handle = serve.get_deployment_handle(deployment, app_name).options(
                    request_serialization="pickle", response_serialization="noop"
                )
            except Exception as error:
                if str(error) != logged:  # once, not at each attempt: its application may come much later
                    logger.info("No handle to the deployment %s of %s yet: %s", deployment, app_name, error)
                logged = str(error)
                await asyncio.sleep(RETRY_S)
        process_board().subscribe(self._key, self._listed)

    def _listed(self, replica_ids: frozenset[str]) -> None:
        self._loop.call_soon_threadsafe(self._tell, replica_ids)

    def _tell(self, replica_ids: frozenset[str]) -> None:
        if not self._is_closed:
            self._on_change(replica_ids)


class PinningRequestRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica that ``handle.options(session_id=replica_id)`` names.

    Calls without a session, or with one that names no live replica, go to the less busy of two random replicas. So a
    pinned call can reach another replica than the one meant: Serve offers no way to fail it here that does not leave
    a routing task behind, so the callee compares (see ``Hello``).

    When Serve stops a replica it drops it from the list at once, then waits for its requests to end. Pinned calls still
    reach it as long as it has a link.
    """

    _unlisted: frozenset[ReplicaID] = frozenset()

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
        listed = [r for r in candidate_replicas if r.replica_id not in self._unlisted]
        return [random.sample(listed, min(2, len(listed)))]

    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]:
        """The replicas that Serve lists, which are the ones a broadcast reaches."""
        return {name: replica for name, replica in self._replicas.items() if name not in self._unlisted}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's new list, plus the unlisted replicas that still have a link."""
        listed, held = {replica.replica_id for replica in replicas}, process_board().held()
        kept = [r for name, r in self._replicas.items() if name not in listed and name.unique_id in held]
        self._unlisted = frozenset(replica.replica_id for replica in kept)
        super().update_replicas([*replicas, *kept])
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that a call found dead, before Serve's controller knows."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        key = (self._deployment_id.app_name, self._deployment_id.name)
        process_board().publish(key, [replica_id.unique_id for replica_id in self.curr_replicas])


PINNING_REQUEST_ROUTER = "deployments.transport.discovery:PinningRequestRouter"

HEALTH_OPTIONS: dict[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 5.0}
"""Of every deployment. Serve replaces a replica that fails three checks in a row: some 20 s after it hangs.

A check needs one turn of the replica's event loop. Models load before the first check, and steps run on a thread of
their own, so a busy replica answers; only an event loop that gets no turn for 15 s fails. Serve's defaults are 10 s and
30 s.
"""


def pinned_options(graceful_shutdown_timeout_s: float = 30.0) -> dict[str, Any]:
    """Options of draft, target and router; not of the ingress.

    - ``max_ongoing_requests``: a link over Serve's streams counts as a request for as long as it lives. Serve's default
      of 5 would leave later ones waiting; 10000 is never reached.
    - :data:`HEALTH_OPTIONS`: a replica that died is replaced within about a second, one that hangs within 20.
    - ``graceful_shutdown_wait_loop_s``: a replica that is to stop sleeps so long before it first looks whether its
      requests have ended (default 2).

    Args:
        graceful_shutdown_timeout_s: Longest drain of a replica that is to stop; then it is killed.
    """
    return {
        "max_ongoing_requests": 10_000,
        "max_queued_requests": -1,
        **HEALTH_OPTIONS,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": graceful_shutdown_timeout_s,
        "request_router_config": RequestRouterConfig(request_router_class=PINNING_REQUEST_ROUTER),
    }
