"""Draining a running service: no new requests, and time for those that run, before anything is deleted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

INGRESS = "OpenAIIngress"
"""The deployment that takes requests."""
POLL_S = 0.2
PATIENCE_S = 5.0
"""How long the replicas may take to answer one question."""


def drain_ingress(handle: Any, timeout_s: float, is_alive: Callable[[], bool] = lambda: True) -> bool:
    """Tell every replica of the ingress to refuse new requests, and wait for the requests that run.

    The replicas stay where they are and go on answering: a new request gets a 503 with ``Retry-After``. A replica that
    starts meanwhile is told as well.

    Args:
        handle: Serve's handle of the ingress. Its replicas have the methods ``drain`` and ``is_drained``.
        timeout_s: The longest wait.
        is_alive: Whether there is anybody to ask still.

    Returns:
        Whether every request has ended.
    """
    return asyncio.run(_drain(handle, time.monotonic() + timeout_s, is_alive))


async def _drain(handle: Any, deadline_s: float, is_alive: Callable[[], bool]) -> bool:
    while is_alive():
        await _ask(handle, "drain")
        if all(await _ask(handle, "is_drained")):
            return True
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)
    return False


async def _ask(handle: Any, method: str) -> list[bool]:
    """What the replicas answer; those that are gone are left out, and a False stands for one that hangs."""
    try:
        asked = handle.broadcast(method).results_async(return_exceptions=True)
        answers = await asyncio.wait_for(asked, PATIENCE_S)
    except TimeoutError:
        return [False]
    except Exception:  # no replica is left
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]
