"""A small application with the shape of the real one, for tests of the launcher."""

import os
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from cluster.config.app import AppArgs
from cluster.config.names import APPLICATION_NAME
from specdec.core.errors import ModelLoadError


@serve.deployment(name="TargetServer", ray_actor_options={"num_cpus": 1})
class Worker:
    def __init__(self, model: str | None) -> None:
        if model is not None and model.endswith("broken"):
            raise ModelLoadError("the weights are broken")

    async def pid(self) -> int:
        return os.getpid()


@serve.deployment(name="OpenAIIngress", ray_actor_options={"num_cpus": 0})
class Ingress:
    def __init__(self, worker: Any) -> None:
        self._worker = worker

    async def drain_requests(self) -> int:
        return 0

    async def __call__(self, request: Request) -> PlainTextResponse:
        if request.url.path == "/environment":
            return PlainTextResponse(os.environ.get(request.query_params["name"], ""))
        return PlainTextResponse(str(await self._worker.pid.remote()))


def build(args: AppArgs) -> dict[str, serve.Application]:
    ingress: Any = Ingress
    worker: Any = Worker
    return {APPLICATION_NAME: ingress.bind(worker.bind(args.target.model))}
