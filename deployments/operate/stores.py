"""Where the store of a service lives: in one named Ray actor on the head node.

It has the application's name, not its code version: an update, or every replica's end, loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config.app import AppArgs
from cluster.config.limits import ResponsesStore
from deployments.http.store import Changes, MemoryStore, Store, Version
from specdec.core.errors import ServiceUnavailableError

logger = logging.getLogger("ray.serve")

NAMESPACE = "specdec"
"""Ray's namespace of the actors."""
PATIENCE_S = 5.0
"""How long a call may take, beyond the time that it asks to wait."""
START_S = 60.0
"""How long whoever watches waits for the actor's process to start; other calls have no more than their usual time."""
_HEAD = "node:__internal_head__"
"""The resource that Ray gives the head node alone."""
_T = TypeVar("_T")


def open_store(args: AppArgs, application: str) -> Store:
    """The store of an application; the same one for all its ingresses, now and after an update."""
    return RayStore(f"store:{application}", args.responses_store)


class RayStore:
    """A :class:`~deployments.http.store.Store` in a detached actor, which Ray restarts, empty, after its death.

    It runs on the head node, so that no drain of a worker node takes it. If there is no head, any node may have it.

    While a call goes unanswered for too long, further ones fail at once: nothing piles up before an actor that hangs.
    All calls wait for one start of the actor, which goes on when they wait no longer.

    Args:
        name: Of the actor; whoever comes first starts it.
        bounds: Of its records.
    """

    def __init__(self, name: str, bounds: ResponsesStore) -> None:
        self._name = name
        self._bounds = bounds
        self._actor: Any = None
        self._starting: asyncio.Task[None] | None = None
        self._unanswered: asyncio.Future[Any] | None = None

    async def put(self, owner: str, name: str, value: bytes) -> bool:
        """Keep a record; False where it is larger than all records together may be."""
        return bool(await self._call("put", owner, name, value))

    async def get(self, owner: str, name: str) -> bytes | None:
        """A record of that owner."""
        found: bytes | None = await self._call("get", owner, name)
        return found

    async def delete(self, owner: str, name: str) -> bool:
        """Drop a record; returns whether there was one."""
        return bool(await self._call("delete", owner, name))

    async def assign(self, name: str, value: bytes | None) -> bool:
        """Let a name mean a value from now on, or nothing; returns whether it meant anything."""
        return bool(await self._call("assign", name, value))

    async def changes(self, since: Version, wait_s: float) -> Changes:
        """The names that have changed since a version; waits up to ``wait_s`` seconds while there are none."""
        return Changes(*await self._call("changes", since, wait_s, wait_s=wait_s))

    async def _call(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        if self._actor is None:
            await self._answer(self._started, START_S if wait_s > 0 else PATIENCE_S)
        return await self._answer(lambda: asyncio.create_task(self._ask(method, args)), wait_s + PATIENCE_S)

    async def _answer(self, ask: Callable[[], asyncio.Task[_T]], timeout_s: float) -> _T:
        if self._unanswered is not None and not self._unanswered.done():
            raise ServiceUnavailableError("the store of responses and adapters still owes an earlier answer")
        call = ask()
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
        for _ in range(2):  # a loop that stood still finds the answer in the second half
            await asyncio.wait({call}, timeout=timeout_s / 2)
        if not call.done():
            self._unanswered = call
            raise ServiceUnavailableError(f"the store of responses and adapters did not answer within {timeout_s:g} s")
        try:
            return call.result()
        except Exception as error:
            raise ServiceUnavailableError(f"the store of responses and adapters failed: {error!r}") from error

    async def _ask(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            return await getattr(self._actor, method).remote(*args)
        except ActorDiedError:  # for good: the next call starts another
            self._actor = None
            raise

    def _started(self) -> asyncio.Task[None]:
        """The start of the actor that is under way, or a new one."""

        async def start() -> None:
            self._actor = await self._start()

        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(start())
        return self._starting

    async def _start(self) -> Any:
        """The actor that is there, or a new one, once it answers; its bounds are this version's."""
        actor = await asyncio.to_thread(self._actor_there)
        await actor.set_bounds.remote(self._bounds)
        return actor

    def _actor_there(self) -> Any:
        options: dict[str, Any] = {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached"}
        heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"]]
        if heads:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(heads[0], soft=True)
        kind = ray.remote(MemoryStore).options(
            num_cpus=0, max_restarts=-1, max_concurrency=1000, get_if_exists=True, **options
        )
        return kind.remote(self._bounds)
