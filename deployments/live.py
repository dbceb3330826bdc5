"""Deployments whose keys change without a restart, and whom a wrong one does not stop."""

from __future__ import annotations

import logging
from typing import Any

from cluster.config import AppArgs
from cluster.live import reconfigured, set_log_level
from deployments.transport.endpoints import Endpoint
from specdec.errors import SpecdecError

logger = logging.getLogger("ray.serve")


class LiveKeys(Endpoint):
    """An end that takes Serve's ``user_config``; see :mod:`cluster.live`.

    Serve stops a replica whose ``reconfigure`` raises. One that starts may be stopped, and with it the update; one that
    serves keeps what was in force, says so as an error, and counts it.

    """

    _args: AppArgs
    _num_config_errors = 0
    _has_served = False
    _serves_level: int | None = None

    def config_report(self) -> dict[str, float]:
        """How many configurations were refused while this replica served, for the metrics page."""
        return {"num_config_errors": float(self._num_config_errors)}

    async def check_health(self) -> None:
        """Serve's health check, whose first one ends the start."""
        await super().check_health()
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
            self._go_by(args)
        except SpecdecError as error:
            if not self._has_served:
                raise
            self._num_config_errors += 1
            logger.error("user_config is refused, and what was in force stays so: %s", error)
            return
        set_log_level(args, self._serves_level)

    def _go_by(self, args: AppArgs) -> None:
        """Go by a configuration that is valid.

        Raises:
            SpecdecError: A file that it names cannot be used; then nothing has changed.
        """
        raise NotImplementedError
