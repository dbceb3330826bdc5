"""Which replicas of a deployment are live, and a handle to them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.transport.board import Listener, process_board
from deployments.transport.wire import LinkError

logger = logging.getLogger("ray.serve")

RETRY_S = 0.5


class Discovery:
    """Watches one deployment, which must have the ``PinningRequestRouter``.

    Event driven: Serve's controller pushes the list of running replicas to every handle, within milliseconds of a
    change that it knows of. A replica that is shutting down is not listed any more.

    Args:
        deployment: Name of the deployment; it may come into being later.
        app_name: Name of its application.
        on_change: Called on the event loop with all live replica ids, now and at every change.
    """

    def __init__(self, deployment: str, app_name: str, on_change: Listener) -> None:
        self.deployment = deployment
        self._app_name = app_name
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._handle: DeploymentHandle | None = None
        self._end: Callable[[], None] | None = None
        self._starting: asyncio.Task[None] | None = None

    @property
    def handle(self) -> DeploymentHandle:
        """The handle, on the gRPC transport; there is one as soon as a replica has been listed.

        Raises:
            LinkError: Serve has not been asked for it successfully yet.
        """
        if self._handle is None:
            raise LinkError(f"no handle to the deployment {self.deployment} yet")
        return self._handle

    def start(self) -> None:
        """Start watching; on the event loop."""
        # Serve takes calls made in a request's context for a part of that request, and cancels them with it.
        self._starting = self._loop.create_task(self._start(), context=contextvars.Context())

    def close(self) -> None:
        """Stop watching; ``on_change`` is not called any more."""
        if self._starting is not None:
            self._starting.cancel()
        if self._end is not None:
            self._end()
        self._on_change = _ignore

    async def _start(self) -> None:
        while self._handle is None:
            try:
                # A copy with options has its request router already; a bare handle gets one with its first call.
                self._handle = serve.get_deployment_handle(self.deployment, self._app_name).options(
                    _by_reference=False, request_serialization="pickle", response_serialization="pickle"
                )
            except Exception as error:
                logger.info("No handle to the deployment %s yet: %s", self.deployment, error)
                await asyncio.sleep(RETRY_S)
        self._end = process_board().subscribe((self._app_name, self.deployment), self._listed)

    def _listed(self, replica_ids: frozenset[str]) -> None:
        self._loop.call_soon_threadsafe(self._tell, replica_ids)

    def _tell(self, replica_ids: frozenset[str]) -> None:
        self._on_change(replica_ids)


def _ignore(_replica_ids: frozenset[str]) -> None:
    """Nobody wants to know."""
