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


def drain_ingress(
    handle: Any,
    timeout_s: float,
    is_alive: Callable[[], bool] = lambda: True,
    report: Callable[[int], None] = lambda _: None,
) -> bool:
    """Tell every replica of the ingress to refuse new requests, and wait for the requests that run.

    The replicas stay where they are and go on answering: a new request gets a 503 with ``Retry-After``. A replica that
    starts meanwhile is told as well.

    Args:
        handle: Serve's handle of the ingress. Its replicas have a method ``drain_requests``, which says how
            many still run.
        timeout_s: The longest wait.
        is_alive: Whether there is anybody to ask still.
        report: Is given how many requests still run, whenever that has changed.

    Returns:
        Whether every request has ended.
    """
    return asyncio.run(_drain(handle, time.monotonic() + timeout_s, is_alive, report))


async def _drain(handle: Any, deadline_s: float, is_alive: Callable[[], bool], report: Callable[[int], None]) -> bool:
    told = 0
    while is_alive():
        num_running = await _ask(handle)
        if num_running == 0:
            return True
        if num_running is not None and num_running != told:
            told = num_running
            report(num_running)
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)
    return False


async def _ask(handle: Any) -> int | None:
    """How many requests run on all replicas together, but for those that are gone; None where one hangs."""
    try:
        asked = handle.broadcast("drain_requests").results_async(return_exceptions=True)
        answers = await asyncio.wait_for(asked, PATIENCE_S)
    except TimeoutError:
        return None
    except Exception:  # no replica is left
        return 0
    return sum(int(answer) for answer in answers if not isinstance(answer, BaseException))
