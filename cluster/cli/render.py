"""``specdec render``: one configuration as Serve's YAML, and as a kustomization for KubeRay."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from cluster.config.app import ServiceConfig
from cluster.config.base import validated
from cluster.config.files import check_named, read_yaml
from cluster.launch.placement import check_gpus
from cluster.launch.serve_config import (
    GRACE,
    KUSTOMIZATION,
    copy_overlay,
    find_overlay,
    kustomization,
    laid_over,
    node_environment,
    placement,
    pods,
    serve_config,
)
from specdec.core.errors import InvalidParameterError

USAGE = "CONFIG.yaml [--overlay OVERLAY] [--out FOLDER]"
_POD_PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``specdec render``."""
    parser.add_argument("config", metavar="CONFIG.yaml", help="the configuration that specdec serve takes")
    parser.add_argument(
        "--overlay",
        help="folder of an overlay for Kubernetes, or the name of one that comes with specdec, such as prod",
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where to write; without it Serve's YAML is printed")


def run(arguments: argparse.Namespace) -> int:
    """Write the files, or print Serve's YAML. Returns the exit code."""
    overlay = None if arguments.overlay is None else find_overlay(arguments.overlay)
    files = render(Path(arguments.config), overlay)
    if arguments.out is None:
        print(files["serve.yaml"], end="")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    if overlay is not None:
        path = copy_overlay(overlay, arguments.out)
        print(arguments.out / path)
        if not (arguments.out / KUSTOMIZATION).exists():  # it may be the user's by now
            files[KUSTOMIZATION] = _yaml(kustomization(overlay, path))
    for name, text in files.items():
        _write(arguments.out / name, text)
        print(arguments.out / name)
    return 0


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all: half a kustomization would pass for the user's own from then on."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def render(path: Path, overlay: Path | None = None) -> dict[str, str]:
    """The texts of ``serve.yaml``, for ``serve deploy``, and of ``environment.env``, for every node of the cluster.

    With an overlay ``grace.yaml`` is among them: how long pods may take to end. Neither flags nor this machine's
    variables and secrets have a say.

    Args:
        path: The service's configuration.
        overlay: Says where replicas run (:func:`cluster.launch.serve_config.placement`); the configuration itself wins.

    Raises:
        InvalidParameterError: The configuration is wrong, or has a key that no cluster can follow.
    """
    data = read_yaml(path)
    if overlay is not None:
        data = laid_over(placement(overlay), data)
    config = validated(ServiceConfig, data, f"{path}: ")
    check_named(path, config)
    check_gpus(config)
    if overlay is not None:
        _check_pods(config)
    head = f"# Written by: specdec render {path.name}\n"
    environment = "".join(f"{name}={value}\n" for name, value in sorted(node_environment(config).items()))
    files = {"serve.yaml": head + _yaml(serve_config(config)), "environment.env": head + environment}
    return files if overlay is None else files | {GRACE: head + _yaml(pods(config))}


def _check_pods(config: ServiceConfig) -> None:
    """Refuse what the pods' ports and probes could not follow."""
    if config.port != _POD_PORT:
        raise InvalidParameterError("port", f"port: the pods' port is {_POD_PORT}: leave it out; a Service may map it")
    if config.tls.model_fields_set:
        raise InvalidParameterError(
            "tls", "tls: KubeRay and the probes speak HTTP: leave it out, and end TLS at the gateway"
        )


def _yaml(content: dict[str, Any]) -> str:
    return yaml.dump(content, Dumper=_WithoutAliases, sort_keys=False, width=118, allow_unicode=True)


class _WithoutAliases(yaml.SafeDumper):
    """Writes what occurs twice, twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never an alias."""
        return True
