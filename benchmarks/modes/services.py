"""Services for the time of a benchmark: one per mode, side by side, so that rounds can be interleaved."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import SpawnProcess
from types import TracebackType

import httpx2

from benchmarks.modes.compare import Variant
from benchmarks.modes.load import Workload, run_workload, served_model
from benchmarks.modes.measures import Run
from cluster.config.app import ServiceConfig
from cluster.launch.local import LaunchError, check_port

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
INTERRUPT_GRACE_S = 30.0
POLL_S = 0.5

Serve = Callable[[ServiceConfig], int]
"""Serves until it is told to stop; returns an exit code."""


class Services:
    """Running services, by their mode; a context manager that stops what it started.

    Args:
        configs: What to serve, by name. The ports are chosen here.
        serve: Runs one service in a process of its own, until SIGTERM.
    """

    def __init__(self, configs: Mapping[str, ServiceConfig], serve: Serve) -> None:
        self._configs = dict(configs)
        self._serve = serve
        self._processes: dict[str, SpawnProcess] = {}
        self._old_handler: signal.Handlers | Callable[..., object] | int | None = None
        self.urls: dict[str, str] = {}

    def __enter__(self) -> Services:
        """Start all, one after the other, and wait until each answers. SIGTERM then ends this process in good order.

        Raises:
            LaunchError: One of them ended, or did not answer in time.
        """
        self._old_handler = signal.signal(signal.SIGTERM, _leave)
        try:
            for name, config in self._configs.items():
                self._start(name, config)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all. After Ctrl-C they have had the signal too, and a second one would not let them drain."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            deadline_s = time.monotonic() + INTERRUPT_GRACE_S
            for process in self._processes.values():
                process.join(max(0.0, deadline_s - time.monotonic()))
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
        for process in self._processes.values():
            process.join(STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
        signal.signal(signal.SIGTERM, self._old_handler)

    def pid(self, name: str) -> int:
        """The process that serves one of them; all others of the service are below it."""
        pid = self._processes[name].pid
        assert pid is not None, "it was started"
        return pid

    def _start(self, name: str, config: ServiceConfig) -> None:
        config = config.model_copy(update={"port": check_port(config.host, 0)})
        process = multiprocessing.get_context("spawn").Process(target=_exit_with, args=(self._serve, config))
        process.start()
        self._processes[name] = process
        url = f"http://{config.host}:{config.port}"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(url):
            if process.exitcode is not None:
                message = f"the service for {name} ended while it started, with exit code {process.exitcode}"
                raise LaunchError(message, is_users=process.exitcode == 2)
            if time.monotonic() > deadline_s:
                raise LaunchError(f"the service for {name} does not answer after {START_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        self.urls[name] = url


class HttpRunner:
    """Runs workloads against services; see :data:`benchmarks.modes.compare.Runner`.

    Args:
        urls: By mode; the first also takes variants that leave it open.
    """

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = dict(urls)
        self._models: dict[str, str] = {}

    def __call__(self, variant: Variant, workload: Workload) -> Run:
        """Run a workload once.

        Raises:
            httpx2.HTTPError: The service cannot be reached, or refuses a request.
        """
        return asyncio.run(self._run(self._url(variant), workload))

    def _url(self, variant: Variant) -> str:
        return self._urls.get(variant.mode or "") or next(iter(self._urls.values()))

    async def _run(self, url: str, workload: Workload) -> Run:
        if url not in self._models:
            self._models[url] = await served_model(url)
        return await run_workload(url, self._models[url], workload)


def is_healthy(url: str) -> bool:
    """Whether a service answers."""
    try:
        return httpx2.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _exit_with(serve: Serve, config: ServiceConfig) -> None:
    raise SystemExit(serve(config))
