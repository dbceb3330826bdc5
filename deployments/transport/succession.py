"""Handing a service over from one version to the next, so that one of the two takes requests all the time.

Serve starts the new replicas of all deployments at once, and stops the old ones of a deployment as soon as its own new
ones have started, whatever the other deployments do. A new router without a target that it can work with would take
the place of one that has a target. Therefore a new router starts only when such a target serves, a new ingress only
when such a router does, and the old version goes on as a whole until nobody asks it any more. Versions that can work
with each other need none of this: their replicas have links across.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ray import serve

from cluster.launch.replicas import ask_running
from deployments.transport.wire import FingerprintKind, Identity, mismatch

logger = logging.getLogger("ray.serve")

POLL_S = 0.5
"""How often replicas are asked what they are."""

Ask = Callable[[str], Awaitable[Sequence[Identity] | None]]
"""Gives what the running replicas of a deployment are; None where that is unknown."""


async def running_replicas(deployment: str) -> list[Identity] | None:
    """What the running replicas of a deployment of this application are; None where one does not answer."""
    handle = serve.get_deployment_handle(deployment, serve.get_replica_context().app_name)
    return await ask_running(handle, "identity")


class Succession:
    """The part of one replica in it.

    Args:
        me: What this replica is.
        match: Which fingerprint must be the same in versions that work with each other.
        ask: Gives what running replicas are; among them are neither those that start nor those that stop.
    """

    def __init__(self, me: Identity, match: FingerprintKind = "decision", ask: Ask = running_replicas) -> None:
        self._me = me
        self._match = match
        self._ask = ask

    async def await_turn(self, needs: str, is_linked: Callable[[], bool] = lambda: True) -> None:
        """Return when this replica may take requests.

        That is at once, unless replicas of its deployment run that are of another version: then when a replica of the
        deployment ``needs`` serves that it can work with, and ``is_linked``.
        """
        is_logged = False
        while await self._has_predecessor():
            found = await self._ask(needs)
            if is_linked() and any(self._works_with(other) and other.is_serving for other in found or ()):
                return
            if not is_logged:
                logger.info("Another version serves: this replica waits until %s of its own version does.", needs)
            is_logged = True
            await asyncio.sleep(POLL_S)

    async def hand_over(self, has_clients: Callable[[], bool]) -> None:
        """Return when this replica, which is to stop, should take nothing new any more.

        That is at once, unless replicas of its deployment run that are all of another version: then when nobody is
        linked any more who asks for this one's. While it is unknown who runs, this is asked again.
        """
        while has_clients():
            found = await self._ask(self._me.deployment)
            others = [other for other in found or () if other.replica != self._me.replica]
            if found is not None and (not others or any(self._works_with(other) for other in others)):
                return
            await asyncio.sleep(POLL_S)

    async def _has_predecessor(self) -> bool:
        others = await self._ask(self._me.deployment)
        return others is None or not all(self._works_with(other) for other in others)

    def _works_with(self, other: Identity) -> bool:
        return not mismatch(self._me.fingerprints, other.fingerprints, self._match, other.wire)
