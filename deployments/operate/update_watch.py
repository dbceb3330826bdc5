"""How an update of the application goes, for ``/health``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray import serve

from cluster.launch.local import LOADERS, describe, last_line

logger = logging.getLogger("ray.serve")

FRESH_S = 5.0
"""Serve is asked again when its answer is older than this."""
PATIENCE_S = 2.0
"""How long it may take to answer."""

Update = dict[str, Any]


class UpdateWatch:
    """What Serve says of an application's update, asked not too often; ask it now and then, as it counts the seconds.

    Args:
        application: Name of the application.
        timeout_s: An update that takes longer is late.
        status: Gives Serve's status; raises where it cannot be had.
    """

    def __init__(self, application: str, timeout_s: float, status: Callable[[], Any] = serve.status) -> None:
        self._application = application
        self._timeout_s = timeout_s
        self._status = status
        self._asked_s = float("-inf")
        self._since_s = 0.0
        self._told: Update | None = None

    async def get(self) -> Update | None:
        """The update that is under way or has failed; None where there is none. While Serve is silent, what it said."""
        if time.monotonic() - self._asked_s >= FRESH_S:
            self._asked_s = time.monotonic()
            try:
                found = await asyncio.wait_for(asyncio.to_thread(self._status), PATIENCE_S)
                application = found.applications.get(self._application)
                if self._told is None:  # Serve's own time is that of the first deployment
                    self._since_s = time.monotonic()
                self._told = told(application, self._timeout_s, time.monotonic() - self._since_s)
            except Exception as error:
                logger.info("Serve's status cannot be had: %r", error)
        return self._told


def told(application: Any, timeout_s: float, age_s: float) -> Update | None:
    """An update in words: whether it is ``under_way``, ``late`` or ``failed``, and what its deployments wait for.

    Args:
        application: Serve's status of it; None where there is no such application.
        timeout_s: An update that takes longer is late.
        age_s: How long it has not been as it is to be.
    """
    status = "RUNNING" if application is None else str(application.status.value)
    if status not in ("DEPLOYING", "DEPLOY_FAILED"):
        return None
    state = "failed" if status == "DEPLOY_FAILED" else "late" if age_s > timeout_s else "under_way"
    waiting = _waiting(application.deployments)
    if not waiting and application.message:
        waiting = {"application": last_line(application.message)}
    return {"status": state, "seconds": round(age_s, 1), "waiting_for": waiting}


def _waiting(deployments: Mapping[str, Any]) -> dict[str, str]:
    """Of each deployment that is not as it is to be, what it waits for, or why it has failed."""
    return {
        name: last_line(one.message)
        if one.status.value == "DEPLOY_FAILED"
        else describe(one, loads_model=name in LOADERS)
        for name, one in deployments.items()
        if one.status.value in ("UPDATING", "DEPLOY_FAILED", "UNHEALTHY")
    }
