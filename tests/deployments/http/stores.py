"""A store that fails or hangs when it is told to."""

from __future__ import annotations

from typing import Any

from cluster.config.limits import ResponsesStore
from deployments.http.store import Store
from deployments.operate.stores import RayStore


class FaultyStore(RayStore):
    """The client of a store's actor, with a store in this process in the actor's place.

    Attributes:
        fault: Raised by every call while set.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__("", ResponsesStore())
        self._actor = inner
        self.inner = inner
        self.fault: Exception | None = None

    async def _ask(self, method: str, args: tuple[Any, ...]) -> Any:
        if self.fault is not None:
            raise self.fault
        return await getattr(self.inner, method)(*args)
