"""How a deployment that has no replicas gets one: by a call that waits for it, as Serve starts one for that at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from deployments.transport.link import spawn

logger = logging.getLogger("ray.serve")

PERIOD_S = 1.0
"""How often somebody looks whether a replica is wanted; what is wanted at two looks in a row is called for."""
PATIENCE_S = 10.0
"""For how long a call waits before it is looked again."""


class Waker:
    """Calls for a replica while one is wanted; on the event loop.

    Args:
        is_wanted: Whether there is none, and there should be one.
        call: Calls a method of the deployment, without doing anything; gives Serve's response.
    """

    def __init__(self, is_wanted: Callable[[], bool], call: Callable[[], Any]) -> None:
        self._is_wanted = is_wanted
        self._call = call
        self._task = spawn(self._run())

    def close(self) -> None:
        """Call no more."""
        self._task.cancel()

    async def _run(self) -> None:
        was_wanted = False
        while True:
            await asyncio.sleep(PERIOD_S)
            is_wanted = self._is_wanted()
            if is_wanted and was_wanted:
                await self._wake()
            was_wanted = is_wanted

    async def _wake(self) -> None:
        response: Any = None
        try:
            response = self._call()
            async with asyncio.timeout(PATIENCE_S):
                await response
        except Exception as error:  # nobody came yet, or the deployment is not there
            logger.debug("No replica has answered yet: %r", error)
        finally:
            if response is not None:
                response.cancel()
