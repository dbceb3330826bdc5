"""``specdec serve``: the service on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from contextlib import suppress

from cluster.cli.failures import exit_code
from cluster.cli.flags import Parser, add_service_flags, config_overrides
from cluster.config.app import ServiceConfig
from cluster.config.files import load_config
from cluster.config.names import LOCAL_APPLICATIONS
from cluster.launch.local import LocalService, check_port
from cluster.launch.supervise import STOP_TIMEOUT_S, StopRequested, catch_stop, stop_begun, supervised
from cluster.models.download import fetch_models
from specdec.core.types import Progress

USAGE = "[MODEL] [--draft MODEL] [--config FILE.yaml] [--host HOST] [--port PORT] [KEY ...]"


def add_arguments(parser: Parser) -> None:
    """The flags of ``specdec serve``: the file, and every key of it."""
    add_service_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code."""
    return serve(load_config(arguments.config, config_overrides(arguments)))


def serve(config: ServiceConfig, application: str = LOCAL_APPLICATIONS) -> int:
    """Start everything, serve, and stop everything on SIGINT or SIGTERM.

    Args:
        config: What to serve, and where to listen.
        application: Import string of the application's builder.

    Returns:
        0 after a stop that was asked for, also during the start; 2 where the configuration cannot be served, 1 where
        something failed, 130 after a second signal.

    Raises:
        InvalidParameterError: If the address cannot be had.
    """
    config = config.model_copy(update={"port": check_port(config.host, config.port)})
    is_debugged = config.log_level == "debug"
    return supervised(
        lambda: exit_code("specdec serve", lambda: run_service(config, application), is_debugged=is_debugged),
        stop_timeout_s=config.drain_timeout_s + STOP_TIMEOUT_S,
    )


def run_service(config: ServiceConfig, application: str) -> int:
    """Bring the service up, say how to use it, report its changes until a signal comes, and stop it."""
    report, is_chat = progress(), config.demo == "chat"
    config = fetch_models(config, report)
    service = LocalService(config, report, application)
    try:
        try:
            start_ray(service)
            service.deploy()
            service.wait_until_ready()
            report(f"ready: {config.model_name} at {service.url}/v1")
            page = f"\nSee how answers come about: {service.url}/ui\n" if config.app_args().ui == "on" else ""
            say(
                f"\nTry it:\n  {curl_line(service.url, config.model_name, is_chat=is_chat)}\n{page}\nCtrl-C stops it.\n"
            )
            service.watch()
        finally:
            stop_begun()
            service.stop()
    except StopRequested:
        report("stopped")
    return 0


def start_ray(service: LocalService) -> None:
    """Start Ray, which takes SIGTERM for itself meanwhile and then leaves by itself."""
    try:
        service.start_ray()
    except SystemExit:
        raise StopRequested from None
    finally:
        catch_stop()


def progress() -> Progress:
    """A printer of lines with the seconds since now."""
    started_s = time.monotonic()

    def report(line: str) -> None:
        say(f"[{time.monotonic() - started_s:6.1f} s] {line}")

    return report


def say(text: str) -> None:
    """Print; a reader that has gone or a disk that is full stops no service, and keeps none from draining."""
    with suppress(OSError):
        print(text, flush=True)


def curl_line(url: str, model: str, *, is_chat: bool) -> str:
    """A command that tries the service."""
    body: dict[str, object] = {"model": model, "max_tokens": 80, "temperature": 0}
    if is_chat:
        path, body["messages"] = (
            "chat/completions",
            [{"role": "user", "content": "What is photosynthesis? Answer in one sentence."}],
        )
    else:
        path, body["prompt"] = "completions", "def fibonacci(n):"
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
