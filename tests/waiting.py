"""Waiting on an event loop for what must happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; the limit only guards against hanging."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
