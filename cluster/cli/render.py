"""``specdec render``: one configuration as a file for KubeRay, or as Serve's YAML and the variables that nodes need."""

from __future__ import annotations

import argparse
import pkgutil
from pathlib import Path

from cluster.config.app import ServiceConfig
from cluster.config.base import validated
from cluster.config.files import check_named, read_yaml
from cluster.config.names import MONITORING
from cluster.launch.placement import check_gpus
from cluster.launch.ray_service import DEFAULTS, ray_service
from cluster.launch.serve_config import as_yaml, laid_over, node_environment, serve_config
from specdec.core.errors import InvalidParameterError

USAGE = "CONFIG.yaml [--serve | --environment] | --monitoring [FOLDER]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``specdec render``."""
    parser.add_argument(
        "config", metavar="CONFIG.yaml", type=Path, nargs="?", help="the configuration that specdec serve takes"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--serve", action="store_true", help="print what serve deploy takes, for a Ray cluster without Kubernetes"
    )
    what.add_argument(
        "--environment", action="store_true", help="print the variables that each node needs before ray start"
    )
    what.add_argument(
        "--monitoring",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        const=Path("monitoring"),
        help="write dashboards and alerts, for Kubernetes and without, into a folder: monitoring by default",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the file, or write those of monitoring. Returns the exit code."""
    if arguments.monitoring is not None:
        _write_monitoring(arguments.monitoring)
    elif arguments.config is None:
        raise InvalidParameterError("config", "CONFIG.yaml: name the configuration, or give --monitoring")
    else:
        printed = serve_yaml if arguments.serve else environment if arguments.environment else kubernetes_yaml
        print(printed(arguments.config), end="")
    return 0


def _write_monitoring(folder: Path) -> None:
    for name, text in pkgutil.resolve_name(MONITORING)().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


def kubernetes_yaml(path: Path) -> str:
    """KubeRay's RayService and the objects beside it, as one YAML stream.

    Neither flags nor this machine's variables and secrets have a say, here and below.

    Raises:
        InvalidParameterError: The configuration is wrong, or has a key that no cluster can follow; below as well.
    """
    return ray_service(_read(path, is_kubernetes=True), path.name)


def serve_yaml(path: Path) -> str:
    """The Serve configuration for ``serve deploy``."""
    return _written_by(path, "--serve") + as_yaml(serve_config(_read(path)))


def environment(path: Path) -> str:
    """Variables that every node of the cluster needs, a line each."""
    variables = sorted(node_environment(_read(path)).items())
    return _written_by(path, "--environment") + "".join(f"{name}={value}\n" for name, value in variables)


def _written_by(path: Path, flag: str) -> str:
    return f"# Written by: specdec render {path.name} {flag}\n"


def _read(path: Path, is_kubernetes: bool = False) -> ServiceConfig:
    data = read_yaml(path)
    config = validated(ServiceConfig, laid_over(DEFAULTS, data) if is_kubernetes else data, f"{path}: ")
    check_named(path, config)
    check_gpus(config)
    return config
