"""Starting a local Ray and the application on it, watching them, and stopping both again.

Draining a running service: no new requests, and time for those that run, before anything stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil

from cluster.config.app import AppArgs, ServiceConfig
from cluster.config.environment import prepare_for_ray
from cluster.config.names import APPLICATION_NAME, INGRESS, LOCAL_APPLICATIONS, STATUS, STATUS_PARTS, loads_model
from cluster.launch.placement import placement_of, ray_devices, with_pair_placed
from cluster.launch.replicas import PATIENCE_S, ask_running
from cluster.launch.startup import NO_DRAFTS, starting
from cluster.launch.supervise import is_alive
from specdec.core.errors import InvalidParameterError, SpecdecError
from specdec.core.types import Progress

POLL_S = 0.2


def drain_ingress(
    handle: Any,
    timeout_s: float,
    is_alive: Callable[[], bool] = lambda: True,
    report: Callable[[int | None], None] = lambda _: None,
) -> bool:
    """Tell every replica of the ingress to refuse new requests, and wait for the requests that run.

    The replicas stay where they are and go on answering: a new request gets a 503 with ``Retry-After``. A replica that
    starts meanwhile gets this as well. A replica that has died is not waited for; one that does not answer is.

    Args:
        handle: Serve's handle of the ingress. Its replicas have a method ``drain_requests``, which says how
            many still run.
        timeout_s: The longest wait.
        is_alive: Whether there is anybody to ask still.
        report: Is given how many requests still run, whenever that has changed; None where a replica does not answer.

    Returns:
        Whether every request has ended.
    """
    return asyncio.run(_drain(handle, time.monotonic() + timeout_s, is_alive, report))


async def _drain(
    handle: Any, deadline_s: float, is_alive: Callable[[], bool], report: Callable[[int | None], None]
) -> bool:
    reported: int | None = 0
    while is_alive():
        answers = await ask_running(handle, "drain_requests")
        num_running = None if answers is None else sum(answers)
        if num_running == 0:
            return True
        if num_running != reported:
            reported = num_running
            report(num_running)
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)
    return False


OBJECT_STORE_BYTES = 256 << 20

WATCH_S = 2.0
HTTP_TIMEOUT_S = 30.0
SIGNAL_S = 0.3
LAST_WORDS_S = 1.0
"""How long what requests got last may take through Serve's proxy to their clients."""


class LaunchError(SpecdecError):
    """The service did not come up, or went away.

    Attributes:
        is_users: Whether what was asked for cannot be served, rather than something having failed.
    """

    def __init__(self, message: str, *, is_users: bool = False) -> None:
        super().__init__(message)
        self.is_users = is_users


class LocalService:
    """Ray and the application in processes below this one; what is left of them, :mod:`cluster.launch.supervise` ends.

    The steps are separate, so that a caller can be interrupted in any of them and still ``stop``.

    Args:
        config: What to serve, and where to listen; the port is known (not 0).
        report: Is given a line of progress now and then.
        application: Import string of the builder: ``module:function``, which takes :class:`cluster.config.app.AppArgs`.
    """

    def __init__(self, config: ServiceConfig, report: Progress, application: str = LOCAL_APPLICATIONS) -> None:
        self._config = config
        self._report = report
        self._application = application
        self._applications: tuple[str, ...] = ()
        self._states: dict[str, str] = {}
        self._stages: dict[str, str] = {}
        self._log_folder = ""
        self._is_ray_started = False
        self._is_ready = False
        self._heart: list[psutil.Process] = []
        self._preloading: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the service listens, without a path."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        scheme = "http" if self._config.tls.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._config.port}"

    def start_ray(self) -> None:
        """Start a Ray of our own on this machine, whatever other Ray there is; token authentication stays on.

        Raises:
            InvalidParameterError: The exporter of traces is not there.
        """
        self._config.tracing.check()
        self._report("starting Ray")
        prepare_for_ray(further=self._config.tracing.variables())
        import ray

        # The application's libraries take seconds to import, Ray as long to start: mostly it waits for its processes.
        self._preloading = threading.Thread(target=preload, args=(self._application,), daemon=True)
        self._preloading.start()
        self._is_ray_started = True
        debug = self._config.log_level == "debug"
        context = ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=debug,
            logging_level="debug" if debug else "error",
            object_store_memory=OBJECT_STORE_BYTES,
        )
        self._heart = [one for one in psutil.Process().children() if one.name() in ("raylet", "gcs_server")]
        self._log_folder = f"{context.address_info['session_dir']}/logs/serve"
        have = ray.cluster_resources()
        self._report(f"Ray is up: {have.get('CPU', 0):g} cores, {have.get('GPU', 0):g} GPUs")
        self._report(f"logs: {self._log_folder}")
        port = ray.nodes()[0].get("MetricsExportPort")
        self._report(f"metrics for Prometheus: http://127.0.0.1:{port}/metrics (Ray's exporter)")

    def deploy(self) -> None:
        """Start Serve with its HTTP proxy, and hand it the application; does not wait for the replicas.

        Raises:
            SpecdecError: If the builder refuses the configuration.
        """
        if self._preloading is not None:  # two threads that import the same packages at once can both fail
            self._preloading.join()
        from ray import serve

        if self._config.log_level != "debug":
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(
            proxy_location="HeadOnly",
            http_options={
                "host": self._config.host,
                "port": self._config.port,
                **self._config.tls.http_options(),
            },
            logging_config={**serves_log(self._config), "log_level": self._config.log_level.upper()},
        )
        self._report("Serve is up")
        args, devices = self._config.app_args(), ray_devices()
        for remark in placement_of(with_pair_placed(args, devices), devices, can_grow=False).remarks:
            self._report(remark)
        built, log = load_builder(self._application)(args), serves_log(args)
        self._applications = tuple(built)
        targets = [
            serve.RunTarget(
                target=app, name=name, route_prefix="/" if name == APPLICATION_NAME else None, logging_config=log
            )
            for name, app in built.items()
        ]
        if self._application == LOCAL_APPLICATIONS:
            targets += [
                serve.RunTarget(
                    target=app, name=f"{APPLICATION_NAME}-{part}", route_prefix=f"/{part}", logging_config=log
                )
                for part, app in status_applications(self._config, self._applications[1:]).items()
            ]
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        self._report("replicas start and load their models")

    def wait_until_ready(self) -> None:
        """Return when every replica is ready and the service answers over HTTP.

        Raises:
            LaunchError: If the application cannot come up; the message says why, and where the logs are.
        """
        while True:
            applications = self._status()
            failures = [first_failure(application) for application in applications]
            failures += [line for line in self._stages.values() if line.startswith(NO_DRAFTS)]
            for failure in filter(None, failures):
                raise self._launch_error(failure)
            if all(application is not None and application.status == "RUNNING" for application in applications):
                break
            time.sleep(POLL_S)
        self._is_ready = True
        self._wait_for_http()

    def watch(self) -> None:
        """Report every change of the replicas until interrupted.

        Raises:
            LaunchError: If Ray goes away.
        """
        while True:
            time.sleep(WATCH_S)
            self._status()

    def stop(self) -> None:
        """Stop all that was started, and nothing else; safe to call at any point, and again.

        The service drains first: new requests are refused, and running ones have ``drain_timeout_s`` to end.
        """
        if self._is_ray_started:
            import ray

            self._report("stopping; Ctrl-C again to force")
            self._drain()
            ray.shutdown()

    def _drain(self) -> None:
        """Let the requests that run end; where the application never got ready there are none.

        A call to a Ray that has died does not return. What stopped us may be on its way to Ray's processes too, so they
        are given time to end, and the calls are made where nobody waits for them.
        """
        if not self._is_ready:
            return
        self._is_ready = False
        time.sleep(SIGNAL_S)
        deadline_s = time.monotonic() + self._config.drain_timeout_s + PATIENCE_S
        thread = threading.Thread(target=self._drain_requests, daemon=True)
        thread.start()
        while thread.is_alive() and self._ray_is_alive() and time.monotonic() < deadline_s:
            thread.join(POLL_S)

    def _drain_requests(self) -> None:
        from ray import serve

        timeout_s = self._config.drain_timeout_s
        try:
            if self._ray_is_alive():
                handle = serve.get_deployment_handle(INGRESS, APPLICATION_NAME)
                if not drain_ingress(handle, timeout_s, self._ray_is_alive, self._report_running):
                    self._report(f"requests still run after drain_timeout_s ({timeout_s:g}): cut off")
                elif self._ray_is_alive():
                    time.sleep(LAST_WORDS_S)
        except Exception as error:  # whatever it is, what is left is stopped next
            self._report(f"the requests could not be waited for: {type(error).__name__}")

    def _report_running(self, num_running: int | None) -> None:
        if num_running is None:
            self._report(f"draining, an ingress has not answered for {PATIENCE_S:g} s")
        else:
            self._report(f"draining, requests still running: {num_running}")

    def _ray_is_alive(self) -> bool:
        return all(is_alive(process) for process in self._heart)

    def _status(self) -> list[Any]:
        """Serve's view of each application, None before there is one; changes since the last call are reported."""
        from ray import serve

        if not self._ray_is_alive():
            raise LaunchError(
                f"Ray has ended: one of its processes died; start specdec serve again; logs: {self._log_folder}"
            )
        status = serve.status().applications
        applications = [status.get(name) for name in self._applications]
        for application in self._applications:
            self._stages |= starting(application)
        for name, deployment in (
            item for application in applications if application is not None for item in application.deployments.items()
        ):
            state = describe(deployment, loads_model=loads_model(name), stage=self._stages.get(name, ""))
            if state.startswith("ready"):  # a replica says its last a while before Serve calls it ready
                self._stages.pop(name, None)
            if self._states.get(name) != state:
                self._states[name] = state
                self._report(f"{name}: {state}")
        return applications

    def _wait_for_http(self) -> None:
        deadline_s = time.monotonic() + HTTP_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                with _own_opener().open(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_S)
        raise LaunchError(f"replicas are ready, but {self.url}/health does not answer; logs: {self._log_folder}")

    def _launch_error(self, message: str) -> LaunchError:
        line = last_line(message)
        is_users = line.startswith("specdec.core.errors.")
        if is_users:
            line = line.partition(": ")[2]
        return LaunchError(f"{line}; logs: {self._log_folder}", is_users=is_users)


def _own_opener() -> urllib.request.OpenerDirector:
    """Opens what this machine serves itself: through no proxy, whoever the certificate is for."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def load_builder(import_string: str) -> Callable[[AppArgs], dict[str, Any]]:
    """The function that ``module:function`` names: it gives applications by their names."""
    module, _, function = import_string.partition(":")
    builder: Callable[[AppArgs], dict[str, Any]] = getattr(importlib.import_module(module), function)
    return builder


def serves_log(args: AppArgs) -> dict[str, Any]:
    """Serve's ``logging_config``; without it an application's replicas log every call among them, as text."""
    return {"encoding": args.log_format.upper(), "enable_access_log": False}


def status_applications(config: ServiceConfig, drafts: Sequence[str]) -> dict[str, Any]:
    """The small applications that tell whether the service is ready, and how it does; by the path of each."""
    module = importlib.import_module(STATUS)
    args = module.StatusArgs(**status_args(config, drafts))
    return {part: getattr(module, f"build_{part}")(args) for part in STATUS_PARTS}


def status_args(config: ServiceConfig, drafts: Sequence[str] = ()) -> dict[str, Any]:
    """What the builders of the status applications take, where it is not as they have it anyway."""
    keys = ("metrics_need_key", "api_keys_file")
    given = config.access.model_dump(include=set(keys), exclude_unset=True)
    given |= config.model_dump(include={"update_timeout_s"}, exclude_unset=True)
    return {"application": APPLICATION_NAME, **({"drafts": list(drafts)} if drafts else {}), **given}


def preload(import_string: str) -> None:
    """Import the builder's module early; what fails will fail again, and be reported, where it is used."""
    with contextlib.suppress(Exception):
        load_builder(import_string)


def first_failure(application: Any) -> str | None:
    """Why an application that is coming up never will, or None while it may.

    A replica whose constructor refuses what the user asked for will refuse it again: Serve's retries are not awaited.
    """
    if application is None:
        return None
    messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
    refused = [message for message in messages if "specdec.core.errors." in message]
    if refused:
        return str(refused[0])
    if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        return str((messages or [application.message])[0])
    return None


def describe(deployment: Any, *, loads_model: bool = False, stage: str = "") -> str:
    """A few words on a deployment's replicas; those that are stopping do not count.

    What Serve says of replicas that do not come up is part of it; that they are slow is said in words of our own.

    Args:
        deployment: Serve's status of it.
        loads_model: Whether its replicas load a model when they start.
        stage: What one of them says that it does; then Serve's guesses that it does nothing yet are left out.
    """
    counts = deployment.replica_states
    running = counts.get("RUNNING", 0)
    total = sum(counts.values()) - counts.get("STOPPING", 0)
    if not total and deployment.status == "HEALTHY":
        return "none is needed now"
    is_ready = bool(running) and running == total
    remarks = [f"{running} of {total}"] if total > 1 else []
    if loads_model and not is_ready:
        remarks.append(stage or "loads the model")
    state = ("ready" if is_ready else "starting") + (f" ({', '.join(remarks)})" if remarks else "")
    message = deployment.message.strip() if running < max(total, 1) else ""
    slow = _slow_start(message)
    if not message or (slow and stage):
        return state
    return f"{state}: {slow or last_line(message)}"


def _slow_start(message: str) -> str | None:
    """What Serve says of replicas that take long, without its guesses why; None where it says something else."""
    slow = re.search(r"have taken more than (\d+)s to (be scheduled|initialize)", message)
    if slow is None:
        return None
    if slow[2] == "initialize":
        return f"takes more than {slow[1]} s"
    needs = re.search(r"Resources required for each replica: (\{.*?\})", message)
    asks = f" or waits for room; it asks for {needs[1]}" if needs else ""
    return f"its process is still being started after {slow[1]} s{asks}"


def last_line(message: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named: Iterable[str] = (line for line in reversed(lines) if "Error: " in line)
    return next(iter(named), lines[-1] if lines else "unknown failure")


def check_port(host: str, port: int) -> int:
    """Check that nobody listens on an address.

    Args:
        host: Name or address.
        port: 0 for any free port.

    Returns:
        The port, or a free one for 0.

    Raises:
        InvalidParameterError: If the address is not this machine's, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return int(listener.getsockname()[1])
    except socket.gaierror:
        raise InvalidParameterError("host", f"host: {host} is no address of this machine") from None
    except PermissionError:
        raise InvalidParameterError("port", f"port: {port} needs privileges; choose one above 1023") from None
    except OSError as error:
        raise InvalidParameterError("port", f"port: {host}:{port} cannot be had ({error.strerror})") from None
