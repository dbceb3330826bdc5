"""The deployment that keeps responses for all ingresses, and how they reach it."""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.limits import ResponsesStore
from deployments.names import STORE
from deployments.openai.responses.store import Record, Shelf
from specdec.errors import ServiceUnavailableError

logger = logging.getLogger("ray.serve")

_PATIENCE_S = 10.0


class ResponseKeeper:
    """Keeps responses in its memory.

    Args:
        bounds: How many, how large, for how long.
    """

    def __init__(self, bounds: ResponsesStore) -> None:
        self._shelf = Shelf(bounds.max_responses, bounds.max_bytes, bounds.max_age_s)

    async def put(self, owner: str, name: str, response: bytes, input_items: bytes) -> bool:
        """Keep a response; false where it is too large."""
        return self._shelf.put(owner, name, Record(response, input_items))

    async def get(self, owner: str, name: str) -> tuple[bytes, bytes] | None:
        """A response of that owner."""
        record = self._shelf.get(owner, name)
        return None if record is None else (record.response, record.input_items)

    async def delete(self, owner: str, name: str) -> bool:
        """Keep a response no longer."""
        return self._shelf.delete(owner, name)


def response_keeper(bounds: ResponsesStore) -> Application | None:
    """The deployment, one replica of it: two would not know of each other's responses; none where nothing is kept."""
    if not bounds.enabled:
        return None
    options = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 1000}
    return serve.deployment(ResponseKeeper, name=STORE).options(**options).bind(bounds)


class RemoteResponses:
    """A :class:`deployments.openai.responses.store.ResponseStore` in that deployment.

    Args:
        handle: Of it.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def put(self, owner: str, name: str, record: Record) -> bool:
        """Keep a response; false where it is too large."""
        return bool(await self._call("put", owner, name, record.response, record.input_items))

    async def get(self, owner: str, name: str) -> Record | None:
        """A response of that owner."""
        found = await self._call("get", owner, name)
        return None if found is None else Record(*found)

    async def delete(self, owner: str, name: str) -> bool:
        """Keep a response no longer."""
        return bool(await self._call("delete", owner, name))

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await getattr(self._handle, method).remote(*args)
        except Exception as error:  # it starts again, or Serve has none
            logger.warning("The store of responses does not answer: %r", error)
            raise ServiceUnavailableError("the store of responses does not answer") from error
