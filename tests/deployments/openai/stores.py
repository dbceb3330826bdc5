"""A store that fails or hangs when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from deployments.store import Changes, Store, Version


class FaultyStore:
    """A store in front of another.

    Attributes:
        fault: Raised by every call while set.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.fault: Exception | None = None

    async def put(self, owner: str, name: str, value: bytes) -> bool:
        return bool(await self._call("put", owner, name, value))

    async def get(self, owner: str, name: str) -> bytes | None:
        found: bytes | None = await self._call("get", owner, name)
        return found

    async def delete(self, owner: str, name: str) -> bool:
        return bool(await self._call("delete", owner, name))

    async def assign(self, name: str, value: bytes | None) -> bool:
        return bool(await self._call("assign", name, value))

    async def changes(self, since: Version, wait_s: float) -> Changes:
        found: Changes = await self._call("changes", since, wait_s)
        return found

    async def _call(self, method: str, *args: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        return await getattr(self.inner, method)(*args)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; the limit only guards against hanging."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
