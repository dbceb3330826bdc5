"""``/health`` and ``/metrics``: applications of their own, so that they do not queue behind requests.

Each is one small replica that asks those of the service, and answers for all of them.
No postponed annotations here: Serve makes a builder's argument by the class that its annotation is.

How an update of the application goes, for ``/health``.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BeforeValidator, Field
from ray import serve
from ray.serve import Application
from ray.util.metrics import Gauge
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.config.base import StrictModel
from cluster.config.environment import api_keys
from cluster.config.limits import names
from cluster.config.names import DRAFT, INGRESS, ROUTER, TARGET, loads_model
from cluster.launch.local import describe, last_line
from cluster.launch.replicas import PATIENCE_S
from cluster.launch.startup import starting
from deployments.http.errors import ApiError
from deployments.http.keys import ApiKeys
from deployments.metrics.page import metrics_page
from deployments.operate.live import WatchedFile
from deployments.operate.readiness import ReplicaPoll, missing_parts
from deployments.transport.discovery import HEALTH_OPTIONS
from specdec.core.errors import SpecdecError

logger = logging.getLogger("ray.serve")

FRESH_S = 5.0
"""Serve is asked again when its answer is older than this."""

UPDATE_LATE = "specdec_update_late"
"""A gauge of each application, by Ray's exporter: the alert on late updates asks for it."""

Update = dict[str, Any]


class UpdateWatch:
    """What Serve says of an application's update, asked not too often; ask it now and then, as it counts the seconds.

    Args:
        application: Name of the application.
        timeout_s: An update that takes longer is late.
        status: Gives Serve's status; raises where it cannot be had.
    """

    def __init__(self, application: str, timeout_s: float, status: Callable[[], Any] = serve.status) -> None:
        self._application = application
        self._timeout_s = timeout_s
        self._status = status
        self._asked_s = float("-inf")
        self._since_s = 0.0
        self._update: Update | None = None

    async def get(self) -> Update | None:
        """The update that is under way or has failed; None where there is none. While Serve is silent, what it said."""
        if time.monotonic() - self._asked_s >= FRESH_S:
            self._asked_s = time.monotonic()
            try:
                found = await asyncio.wait_for(asyncio.to_thread(self._status), PATIENCE_S)
                application = found.applications.get(self._application)
                if self._update is None:  # Serve's own time is that of the first deployment
                    self._since_s = time.monotonic()
                self._update = described(application, self._timeout_s, time.monotonic() - self._since_s)
            except Exception as error:
                logger.info("Serve's status cannot be had: %r", error)
        return self._update


_STATES = ("under_way", "late", "failed")
"""Of an update, from the best to the worst."""


def worst(updates: Iterable[Update | None]) -> Update | None:
    """The worst of several applications' updates; None where there is none."""
    found = [update for update in updates if update is not None]
    return max(found, key=lambda update: _STATES.index(update["status"]), default=None)


def described(application: Any, timeout_s: float, age_s: float) -> Update | None:
    """An update in words: whether it is ``under_way``, ``late`` or ``failed``, and what its deployments wait for.

    Args:
        application: Serve's status of it; None where there is no such application.
        timeout_s: An update that takes longer is late.
        age_s: How long it has not been as it is to be.
    """
    status = "RUNNING" if application is None else str(application.status.value)
    if status not in ("DEPLOYING", "DEPLOY_FAILED"):
        return None
    state = "failed" if status == "DEPLOY_FAILED" else "late" if age_s > timeout_s else "under_way"
    waiting = _waiting(application.deployments)
    if not waiting and application.message:
        waiting = {"application": last_line(application.message)}
    return {"status": state, "seconds": round(age_s, 1), "waiting_for": waiting}


def _waiting(deployments: Mapping[str, Any]) -> dict[str, str]:
    """Of each deployment that is not as it is to be, what it waits for, or why it has failed."""
    return {
        name: last_line(one.message)
        if one.status.value == "DEPLOY_FAILED"
        else describe(one, loads_model=loads_model(name))
        for name, one in deployments.items()
        if one.status.value in ("UPDATING", "DEPLOY_FAILED", "UNHEALTHY")
    }


_HEALTH_S, _METRICS_S = 1.0, 0.1
"""For how long an answer holds, however often it is asked for."""

_OPTIONS: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0},
    "max_ongoing_requests": 1000,
    **HEALTH_OPTIONS,
    "max_surge_percent": 100,
    "graceful_shutdown_timeout_s": 2.0,
    "graceful_shutdown_wait_loop_s": 0.2,
}


class StatusArgs(StrictModel):
    """Arguments of both builders."""

    application: str = Field("specdec", min_length=1, description="name of the application that is reported")
    update_timeout_s: float = Field(900.0, gt=0, description="an update that takes longer is late")
    drafts: Annotated[tuple[str, ...], BeforeValidator(names)] = Field(
        (), description="names of the applications of its draft models"
    )
    metrics_need_key: bool = Field(True, description="where there are API keys, ask for one at /metrics")
    api_keys_file: str | None = Field(
        None, min_length=1, description="file with API keys, as in the application's args"
    )


class Health:
    """200 while requests can be served, else 503 with what is missing, and what replicas that start do."""

    def __init__(self, args: StatusArgs) -> None:
        self._applications = [args.application, *args.drafts]
        self._ingresses = _asked(args.application, INGRESS, "refusal", _HEALTH_S)
        self._routers = _asked(args.application, ROUTER, "workers", _HEALTH_S)
        self._updates = {name: UpdateWatch(name, args.update_timeout_s) for name in self._applications}
        text = "1 while an update takes longer than update_timeout_s, else 0."
        self._late = Gauge(UPDATE_LATE, text, tag_keys=("application",))
        self._of_drafts: dict[str, str] = {}

    async def __call__(self, request: Request) -> Response:
        """Answer."""
        if request.method not in ("GET", "HEAD"):
            headers = {"Allow": "GET, HEAD"}
            text = f"{request.method} is not allowed on /health"
            return ApiError(405, text, code="method_not_allowed", headers=headers).response()
        ingresses, routers, update = await asyncio.gather(self._ingresses.get(), self._routers.get(), self._update())
        missing = missing_parts(ingresses, routers)
        further = ({} if update is None else {"update": update}) | (
            {"drafts": self._of_drafts} if self._of_drafts else {}
        )
        if not missing:
            return JSONResponse({"status": "ready", "missing": {}} | further)
        stages = await self._stages(self._applications[0])
        if "target" in missing and TARGET in stages:
            missing["target"] = stages[TARGET]
        return JSONResponse({"status": "unavailable", "missing": missing, "starting": stages} | further, 503)

    async def check_health(self) -> None:
        """Serve's health check, once a second: how long an update takes is counted even if nobody asks."""
        for name, watch in self._updates.items():
            update = await watch.get()
            is_late = update is not None and update["status"] == "late"
            self._late.set(float(is_late), {"application": name})
        stages = [(name, await self._stages(name)) for name in self._applications[1:]]
        self._of_drafts = {name: line for name, found in stages for line in found.values()}

    async def _update(self) -> Update | None:
        """The worst update of the application and its draft models."""
        return worst(await asyncio.gather(*(watch.get() for watch in self._updates.values())))

    async def _stages(self, application: str) -> dict[str, str]:
        """What an application's replicas that start do, by deployment; nothing where Ray's head does not answer."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(starting, application), PATIENCE_S)
        except Exception as error:
            logger.info("Nobody knows what replicas do that start: %r", error)
            return {}


class Metrics:
    """All of the service's metrics on one page: for one machine. On a cluster Ray's exporters have the same series."""

    def __init__(self, args: StatusArgs) -> None:
        self._args = args
        own = ((args.application, name) for name in (INGRESS, ROUTER, TARGET))
        self._asked = [
            (deployment, _asked(application, deployment, "metrics_page", _METRICS_S))
            for application, deployment in (*own, *((name, DRAFT) for name in args.drafts))
        ]
        self._keys_file = WatchedFile(args.api_keys_file)
        self._keys = self._read_keys()

    def _read_keys(self) -> ApiKeys:
        args = self._args
        return ApiKeys(api_keys(args.api_keys_file) if args.metrics_need_key else {})

    async def check_health(self) -> None:
        """Serve's health check, once a second: API keys are read again when their file has changed."""
        if self._keys_file.has_changed():
            try:
                self._keys = self._read_keys()
            except SpecdecError as error:
                logger.error("access.api_keys_file is refused, and the keys of before hold: %s", error)

    async def __call__(self, request: Request) -> Response:
        """Answer."""
        try:
            self._keys.check(request.headers.get("authorization", ""))
        except ApiError as error:
            return error.response()
        pages = await asyncio.gather(*(asked.get() for _, asked in self._asked))
        failures: Counter[str] = Counter()
        for name, asked in self._asked:
            failures[name] += asked.num_failures
        text = metrics_page([page for found in pages for page in found], failures)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _asked(application: str, deployment: str, method: str, fresh_s: float) -> ReplicaPoll:
    return ReplicaPoll(lambda: serve.get_deployment_handle(deployment, application), method, fresh_s)


def build_health(args: StatusArgs) -> Application:
    """The application at ``/health``."""
    return serve.deployment(Health, name="Health").options(**_OPTIONS).bind(args)


def build_metrics(args: StatusArgs) -> Application:
    """The application at ``/metrics``."""
    return serve.deployment(Metrics, name="Metrics").options(**_OPTIONS).bind(args)
