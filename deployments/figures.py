"""What ingresses and routers tell of themselves: whether the service is ready, and its metrics page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from deployments.metrics import IngressPage, Reports, metrics_page

logger = logging.getLogger("ray.serve")

PATIENCE_S = 2.0
"""How long a replica may take to answer."""
STALE_S = 10.0
"""For how long answers hold where none come any more."""


class IngressFigures(NamedTuple):
    """What one replica of the ingress says of itself.

    Attributes:
        replica: Its id.
        model_name: Name of the target in the API.
        refusal: Why it takes no requests; empty where it does.
        page: Its own metrics, in Prometheus' text format.
        report: What its machine has counted, by name.
    """

    replica: str
    model_name: str
    refusal: str
    page: bytes
    report: dict[str, float]


class Asked:
    """A method of every replica of a deployment, asked not too often however often its answers are wanted.

    A replica that is gone answers nothing, and costs nobody else's answer. Where one hangs, Serve's broadcast gives no
    answers at all: then those of before hold, for a while, so that Serve can replace it.

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
        self._asked_s = self._answered_s = float("-inf")
        self._lock = asyncio.Lock()
        self.answers: list[Any] = []
        self.num_failures = 0

    async def get(self) -> list[Any]:
        """The newest answers; never raises."""
        async with self._lock:
            if time.monotonic() - self._asked_s >= self._fresh_s:
                await self._ask()
                self._asked_s = time.monotonic()
        return self.answers

    async def _ask(self) -> None:
        try:
            answers = await asyncio.wait_for(self._broadcast(), PATIENCE_S)
        except TimeoutError:
            logger.warning("A replica hangs: %s was not answered within %g s", self._method, PATIENCE_S)
            self.num_failures += 1
            if time.monotonic() - self._answered_s > STALE_S:
                self.answers = []
        except Exception as error:  # no application, no replica
            logger.info("Nobody answers %s: %r", self._method, error)
            self.answers = []
        else:
            failed = [answer for answer in answers if isinstance(answer, BaseException)]
            if failed:
                logger.warning("A replica did not answer %s: %r", self._method, failed[0])
            self.answers = [answer for answer in answers if not isinstance(answer, BaseException)]
            self._answered_s = time.monotonic()
            self.num_failures += len(failed)

    async def _broadcast(self) -> list[Any]:
        answers: list[Any] = await self._handle().broadcast(self._method).results_async(return_exceptions=True)
        return answers


Part = Literal["ingress", "router", "target"]


def missing_parts(ingresses: Sequence[IngressFigures], routers: Sequence[Reports]) -> dict[Part, str]:
    """What the service lacks to take requests, and why; nothing where it is ready.

    Ready means: an ingress that takes requests, a router, and a target that takes sequences.
    """
    missing: dict[Part, str] = {}
    if not ingresses:
        missing["ingress"] = "no replica answers"
    elif all(ingress.refusal for ingress in ingresses):
        missing["ingress"] = ingresses[0].refusal
    if not routers:
        missing["router"] = "no replica answers"
    targets = [report for reports in routers for kind, report in reports.values() if kind == "target"]
    if not targets:
        missing["target"] = "no router has a link to one"
    elif all(report.get("is_draining") for report in targets):
        missing["target"] = "all of them drain"
    return missing


async def page(ingresses: Asked, routers: Asked) -> bytes:
    """The metrics page of the whole service."""
    own: list[IngressFigures]
    reports: list[Reports]
    own, reports = await asyncio.gather(ingresses.get(), routers.get())
    reports = [*reports, {one.replica: ("ingress", one.report) for one in own}]
    pages = [IngressPage(ingress.replica, ingress.page) for ingress in own]
    model_name = own[0].model_name if own else ""
    failures = {"ingress": ingresses.num_failures, "router": routers.num_failures}
    return metrics_page(pages, reports, model_name, failures)
