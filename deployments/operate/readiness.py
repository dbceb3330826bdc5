"""What replicas are asked, and whether what they answer makes a service that is ready.

Whether users wait, as the ingresses see it: for the autoscaling of what is behind them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ray import serve

from cluster.config.names import INGRESS
from cluster.launch.replicas import PATIENCE_S, ask_all
from specdec.drafting.plans import WorkerKind

logger = logging.getLogger("ray.serve")

QUICK_S = 0.5
"""How long whoever asks waits for replicas that are late, where something is known without them."""
STALE_S = 10.0
"""For how long answers hold where none come any more."""


class ReplicaPoll:
    """A method of every replica of a deployment, asked not too often however often its answers are wanted.

    A replica that is gone or hangs has no answer, and costs nobody else's, and no more than :data:`QUICK_S`: until it
    has had its time, the answers of before hold, or those that have come. Where none answers because all hang, their
    answers of before hold for :data:`STALE_S`, as a pause of one second should not make a service unready.

    Args:
        handle: Gives a handle of the deployment; may raise as long as there is none.
        method: Called without arguments.
        fresh_s: Answers are asked for again when they are older than this.

    Attributes:
        answers: The newest.
        num_failures: Times that a replica did not answer.
    """

    def __init__(self, handle: Callable[[], Any], method: str, fresh_s: float) -> None:
        self._handle = handle
        self._method = method
        self._fresh_s = fresh_s
        self._asked_s = self._answered_s = self._ended_s = float("-inf")
        self._round: asyncio.Task[None] | None = None
        self._come: list[Any] = []
        self._silence = ""
        self.answers: list[Any] = []
        self.num_failures = 0

    async def get(self) -> list[Any]:
        """The newest answers; never raises."""
        if self._round is None or (self._round.done() and time.monotonic() - self._asked_s >= self._fresh_s):
            self._asked_s, self._come = time.monotonic(), []
            self._round = asyncio.ensure_future(self._ask())
        asked = self._round
        await asyncio.wait({asked}, timeout=QUICK_S)
        while not asked.done():
            if time.monotonic() - self._ended_s < STALE_S:
                break
            if self._come:
                return self._come.copy()
            await asyncio.wait({asked}, timeout=QUICK_S)
        return self.answers

    async def _ask(self) -> None:
        await self._ask_all()
        self._ended_s = time.monotonic()

    async def _ask_all(self) -> None:
        try:
            results = await ask_all(self._handle(), self._method, self._come.append)
        except Exception as error:  # no application, no replica
            is_news, self._silence = repr(error) != self._silence, repr(error)
            logger.log(logging.INFO if is_news else logging.DEBUG, "Nobody answers %s: %r", self._method, error)
            self.answers = []
            return
        self._silence = ""
        failed = [answer for answer in results if isinstance(answer, BaseException)]
        answers = [answer for answer in results if not isinstance(answer, BaseException)]
        self.num_failures += len(failed)
        for failure in failed:
            why = f"timed out after {PATIENCE_S:g} s" if isinstance(failure, TimeoutError) else repr(failure)
            logger.warning("A replica did not answer %s, and is left out of this answer: %s", self._method, why)
        all_hang = not answers and any(isinstance(failure, TimeoutError) for failure in failed)
        if not all_hang:
            self._answered_s = time.monotonic()
        if not all_hang or time.monotonic() - self._answered_s > STALE_S:
            self.answers = answers


RequiredPart = Literal["ingress", "router", "target"]
Workers = Mapping[str, tuple[WorkerKind, bool]]
"""What one router tells: its workers by name, the kind of each, and whether it drains."""


def missing_parts(refusals: Sequence[str], routers: Sequence[Workers]) -> dict[RequiredPart, str]:
    """What the service lacks to take requests, and why; nothing where it is ready.

    Ready means: an ingress that takes requests, a router, and a target that takes sequences.

    Args:
        refusals: Why each ingress that answered takes no requests; empty where it does.
        routers: What the routers that answered tell.
    """
    missing: dict[RequiredPart, str] = {}
    if not refusals:
        missing["ingress"] = "no replica answers"
    elif all(refusals):
        missing["ingress"] = refusals[0]
    if not routers:
        missing["router"] = "no replica answers"
    targets = [is_draining for workers in routers for kind, is_draining in workers.values() if kind == "target"]
    if not targets:
        missing["target"] = "no router has a link to one"
    elif all(targets):
        missing["target"] = "all of them drain"
    return missing


_FRESH_S = 1.0


def users_poll() -> ReplicaPoll:
    """Asks every ingress of this replica's application, at most once a second."""
    return ReplicaPoll(_ingresses, "users_wait", _FRESH_S)


async def users_load(poll: ReplicaPoll) -> dict[str, float]:
    """The part of a replica's load that only ingresses know: ``users_wait``, 1 where users of any ingress wait."""
    return {"users_wait": max(await poll.get(), default=0.0)}


def _ingresses() -> Any:
    return serve.get_deployment_handle(INGRESS, serve.get_replica_context().app_name)
