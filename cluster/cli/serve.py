"""``specdec serve``: the service on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time

from cluster.cli.flags import add_config_flags, config_overrides
from cluster.cli.signals import StopForced, StopRequested, StopSignals
from cluster.config import ServiceConfig
from cluster.config_files import load_config
from cluster.launch import APPLICATION, LocalService, Report, check_port

EXIT_FORCED = 130

USAGE = "[--target MODEL --draft MODEL] [--config FILE.yaml] [--host HOST] [--port PORT] [KEY ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``specdec serve``: the file, and every key of it."""
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code."""
    return serve(load_config(arguments.config, config_overrides(arguments)))


def serve(config: ServiceConfig, application: str = APPLICATION) -> int:
    """Start everything, serve, and stop everything on SIGINT or SIGTERM.

    Args:
        config: What to serve, and where to listen.
        application: Import string of the application's builder.

    Returns:
        0 after an orderly stop, also of a start. A second signal ends the process at once, with code 130.

    Raises:
        SpecdecError: If the service cannot be started.
    """
    config = config.model_copy(update={"port": check_port(config.host, config.port)})
    report = progress()
    signals = StopSignals()
    signals.install()
    service = LocalService(config, report, application)
    try:
        try:
            start_and_watch(service, config, signals, report)
        except StopRequested:
            report("stopping; Ctrl-C again to force")
        finally:
            service.stop()
        report("stopped")
    except StopForced:
        service.kill()
        report("killed")
        os._exit(EXIT_FORCED)
    return 0


def start_and_watch(service: LocalService, config: ServiceConfig, signals: StopSignals, report: Report) -> None:
    """Bring the service up, say how to use it, and report its changes until a signal comes."""
    try:
        service.start_ray()
    except SystemExit:  # Ray's own handler of SIGTERM, while it starts
        raise StopRequested from None
    finally:
        signals.install()
    service.deploy()
    service.wait_until_ready()
    report(f"ready: {config.model_name} at {service.url}/v1")
    print(f"\nTry it:\n  {curl_line(service.url, config.model_name)}\n\nCtrl-C stops it.\n", flush=True)
    service.watch()


def progress() -> Report:
    """A printer of lines with the seconds since now."""
    started_s = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - started_s:6.1f} s] {line}", flush=True)

    return report


def curl_line(url: str, model: str) -> str:
    """A command that tries the service."""
    body = json.dumps({"model": model, "prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0})
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
