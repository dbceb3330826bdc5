"""Asking every replica of a deployment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 2.0
"""How long a replica may take to answer."""


async def ask_all(handle: Any, method: str, answered: Callable[[Any], None] = lambda _: None) -> list[Any]:
    """Call a method of every replica.

    Args:
        handle: Serve's handle of the deployment.
        method: Called without arguments.
        answered: Is given each answer as it comes.

    Returns:
        By replica its answer, or the exception in place of it: ``TimeoutError`` if it took longer than
        :data:`PATIENCE_S`.

    Raises:
        Exception: Nobody can be asked: there is no such deployment, or it has no replica.
    """
    by_s = time.monotonic() + PATIENCE_S

    async def answer_of(replica: Any) -> Any:
        answer = await asyncio.wait_for(replica.get_async(), by_s - time.monotonic())
        answered(answer)
        return answer

    # Serve's public method gives all answers or, where one replica hangs, none.
    asked = handle.broadcast(method)._fetch_replica_results_async()
    replicas = await asyncio.wait_for(asked, by_s - time.monotonic())
    return await asyncio.gather(*map(answer_of, replicas), return_exceptions=True)


async def ask_running(handle: Any, method: str) -> list[Any] | None:
    """Call a method of every replica and return all answers; None if a replica that has not died gives none."""
    from ray.exceptions import ActorDiedError, RayError
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        results = await ask_all(handle, method)
    except DeploymentUnavailableError:  # also when a new handle does not know of any replica yet
        return None if await asyncio.to_thread(_has_running, handle) else []
    except (RayError, TimeoutError):
        return None
    living = [result for result in results if not isinstance(result, ActorDiedError)]
    is_whole = bool(results) and not any(isinstance(result, BaseException) for result in living)
    return living if is_whole else None


def _has_running(handle: Any) -> bool:
    from ray import serve

    application = serve.status().applications.get(handle.app_name)
    found = None if application is None else application.deployments.get(handle.deployment_name)
    return found is not None and found.replica_states.get("RUNNING", 0) > 0
