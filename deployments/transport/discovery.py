"""Which replicas of a deployment are live, and a handle to them."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.transport.wire import LinkError

logger = logging.getLogger("ray.serve")

RETRY_S = 0.5
ReplicaListener = Callable[[frozenset[str]], None]
DeploymentKey = tuple[str, str]
"""Application and deployment name."""


class ReplicaBoard:
    """The newest list of replica ids of each deployment, and who wants to know; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        told = ""
        while self._handle is None:
            try:
                # A copy with options has its request router already; a bare handle gets one with its first call.
                self._handle = serve.get_deployment_handle(deployment, app_name).options(
                    request_serialization="pickle", response_serialization="noop"
                )
            except Exception as error:
                if str(error) != told:  # once, not at each attempt: its application may come much later
                    logger.info("No handle to the deployment %s of %s yet: %s", deployment, app_name, error)
                told = str(error)
                await asyncio.sleep(RETRY_S)
        process_board().subscribe(self._key, self._listed)

    def _listed(self, replica_ids: frozenset[str]) -> None:
        self._loop.call_soon_threadsafe(self._tell, replica_ids)

    def _tell(self, replica_ids: frozenset[str]) -> None:
        if not self._is_closed:
            self._on_change(replica_ids)
