"""Deployments whose keys change without a restart, and whom a wrong one does not stop."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

from cluster.config.app import AppArgs
from cluster.config.live import reconfigured, set_log_level
from deployments.transport.endpoints import Endpoint
from specdec.core.errors import SpecdecError

logger = logging.getLogger("ray.serve")


class WatchedFile:
    """Tells when a file has become another; also where it is a link, as Kubernetes' secrets are.

    Args:
        path: Of the file; None is no file, which never changes.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._seen = self._stamp()

    def has_changed(self) -> bool:
        """Whether it is another than at the last call."""
        before, self._seen = self._seen, self._stamp()
        return self._seen != before

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = None if self._path is None else Path(self._path).stat()
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_ino, found.st_size)


class LiveKeys(Endpoint):
    """An end that takes Serve's ``user_config``; see :mod:`cluster.config.live`.

    Serve stops a replica whose ``reconfigure`` raises. One that starts may be stopped, and with it the update; one that
    serves keeps what was in force, says so as an error, and counts it.
    """

    _args: AppArgs
    _num_config_errors = 0
    _has_served = False
    _serves_level: int | None = None

    def config_metrics(self) -> dict[str, float]:
        """How many configurations were refused while this replica served, for the metrics page."""
        return {"num_config_errors": float(self._num_config_errors)}

    async def check_health(self) -> None:
        """Serve's health check, whose first one ends the start."""
        await super().check_health()
        if not self._has_served:
            await self.await_turn()
            gc.collect()
            gc.freeze()  # what is there now stays: no later collection of garbage has to look at it, which takes 100 ms
        self._has_served = True

    async def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Go by other keys from now on.

        Raises:
            SpecdecError: The replica starts, and a key needs a restart or its value is not allowed.
        """
        if self._serves_level is None:
            self._serves_level = logger.level
        try:
            args = reconfigured(self._args, user_config)
            await self._prepare(args)
            self._go_by(args)
        except SpecdecError as error:
            if not self._has_served:
                raise
            self._refused("user_config", error)
            return
        set_log_level(args, self._serves_level)

    def _refused(self, what: str, error: SpecdecError) -> None:
        self._num_config_errors += 1
        logger.error("%s is refused, and what was in force stays so: %s", what, error)

    async def _prepare(self, args: AppArgs) -> None:
        """Do what takes long before :meth:`_go_by`.

        Raises:
            SpecdecError: A file that the configuration names cannot be used; then nothing has changed.
        """

    def _go_by(self, args: AppArgs) -> None:
        """Go by a configuration that is valid.

        Raises:
            SpecdecError: A file that it names cannot be used; then nothing has changed.
        """
        raise NotImplementedError
