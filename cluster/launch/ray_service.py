"""The service on Kubernetes as one file: KubeRay's RayService, and the objects beside it."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

import specdec
from cluster.config.app import ServiceConfig
from cluster.config.replicas import ActorOptions, ReplicaRange, least, most
from cluster.launch.serve_config import as_yaml, node_environment, placed, pod_grace_s, serve_config
from specdec.core.errors import InvalidParameterError

HEAD = "headgroup"
HEAD_ROLE = "head"
POD_PORT = 8000
ROLE = "role"
"""Label that a replica selects its pods by. Its value is also the name of the group of pods."""
DEFAULTS: Mapping[str, Any] = {
    "actors": {
        "target": {"num_cpus": 4, "label_selector": {ROLE: "target"}},
        "draft": {"num_cpus": 2, "label_selector": {ROLE: "draft"}},
        "router": {"num_cpus": 0, "label_selector": {ROLE: "front"}},
        "ingress": {"num_cpus": 0, "label_selector": {ROLE: "front"}},
    }
}
"""Where replicas run if the configuration does not say."""
_LEAST_CPUS = {"head": 2, "front": 4}
_GIB_OF_A_POD, _GIB_OF_A_GPU = 8, 32


@dataclass(frozen=True, slots=True)
class Group:
    """Pods of one kind.

    Attributes:
        name: KubeRay's name of the group.
        labels: Of their Ray nodes.
        parts: Which replicas run in them, by the configuration's names; a pod has room for one of each.
        asked_cpus: Cores that these ask for.
        gpus: GPUs of a pod.
        resources: Ray's custom resources of a pod.
        least: Pods that there are in any case.
        most: Pods that there may be.
        image: What they run.
    """

    name: str
    labels: dict[str, str]
    parts: tuple[str, ...]
    asked_cpus: int
    gpus: int
    resources: dict[str, str]
    least: int
    most: int
    image: str

    @property
    def is_head(self) -> bool:
        """Whether Ray's head is in it."""
        return self.name == HEAD

    @property
    def is_front(self) -> bool:
        """Whether these pods run the ingress, which answers clients."""
        return "ingress" in self.parts

    @property
    def node_selector(self) -> dict[str, str]:
        """Labels of Kubernetes' nodes: all that a replica asks for but its role."""
        return {name: value for name, value in self.labels.items() if name != ROLE}

    @property
    def cpus(self) -> int:
        """Cores of a pod."""
        return max(
            self.asked_cpus, _LEAST_CPUS["head"] if self.is_head else _LEAST_CPUS["front"] if self.is_front else 1
        )

    @property
    def memory(self) -> str:
        """Memory of a pod."""
        return f"{max(_GIB_OF_A_POD, _GIB_OF_A_GPU * self.gpus)}Gi"


def ray_service(config: ServiceConfig, name: str) -> str:
    """The file's text.

    Args:
        config: The service; every replica asks for a role, as by :data:`DEFAULTS`.
        name: Of the configuration's file.

    Raises:
        InvalidParameterError: A key that no cluster, or no pod, can follow.
    """
    _check(config)
    config = placed(config)
    keys_file = config.access.api_keys_file
    counts = [getattr(config.replicas, part) for part in _parts(config)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"flow": _flow, "quoted": json.dumps}
    return environment.get_template("ray_service.yaml.j2").render(
        name=name,
        groups=groups(config),
        grace_s=pod_grace_s(config.drain_timeout_s),
        ray_version=importlib.metadata.version("ray"),
        environment=dict(sorted(node_environment(config).items())),
        keys_folder=None if keys_file is None else str(Path(keys_file).parent),
        serve=as_yaml(serve_config(config)).rstrip("\n"),
        is_fleet=any(least(count) > 1 for count in counts),
        grows=any(isinstance(count, ReplicaRange) for count in counts),
    )


def groups(config: ServiceConfig) -> tuple[Group, ...]:
    """The head, and a group of pods for each role that replicas ask for; a pod has room for one replica of each kind.

    Raises:
        InvalidParameterError: Replicas of one role ask for different nodes, or for what no pod's label can say.
    """
    members: dict[str, list[str]] = {HEAD_ROLE: []}
    for part in _parts(config):
        members.setdefault(_labels(config, part)[ROLE], []).append(part)
    return tuple(_group(config, role, parts) for role, parts in members.items())


def _group(config: ServiceConfig, role: str, parts: list[str]) -> Group:
    labels = {ROLE: role}
    for part in parts:
        own = _labels(config, part)
        differing = [name for name in own.keys() & labels.keys() if own[name] != labels[name]]
        if differing:
            key = f"actors.{part}.label_selector"
            raise InvalidParameterError(
                key, f"{key}: {differing[0]}: replicas with role {role} share pods: give all one"
            )
        labels |= own
    asked: list[ActorOptions] = [getattr(config.actors, part) for part in parts]
    counts = [getattr(config.replicas, part) for part in parts]
    resources: Counter[str] = Counter()
    for options in asked:
        resources.update(options.resources)
        if options.accelerator_type:
            resources[f"accelerator_type:{options.accelerator_type}"] = 1
    grows = any(isinstance(count, ReplicaRange) for count in counts)
    gpus = math.ceil(sum(options.num_gpus or 0 for options in asked) - 1e-6)
    return Group(
        name=HEAD if role == HEAD_ROLE else role,
        labels=labels,
        parts=tuple(parts),
        asked_cpus=math.ceil(sum(options.num_cpus or 0 for options in asked)),
        gpus=gpus,
        resources={name: f"{amount:g}" for name, amount in resources.items()},
        least=max(map(least, counts), default=1),
        # An update starts a new ingress and a new router before the old one ends.
        most=max(map(most, counts), default=1) + (grows and "ingress" in parts),
        image=f"specdec:{specdec.__version__}{_variant(config, parts, gpus)}",
    )


def _variant(config: ServiceConfig, parts: list[str], gpus: int) -> str:
    if "target" in parts and config.target.engine == "vllm" and config.target.python is None:
        return "-vllm"
    return "-cuda" if gpus else ""


def _parts(config: ServiceConfig) -> tuple[str, ...]:
    return ("ingress", "router", "target", *(("draft",) if config.has_own_draft else ()))


def _labels(config: ServiceConfig, part: str) -> dict[str, str]:
    options: ActorOptions = getattr(config.actors, part)
    for name, value in options.label_selector.items():
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?" if name == ROLE else r"[\w.-]+", value):
            key = f"actors.{part}.label_selector"
            raise InvalidParameterError(
                key, f"{key}: {name}: {value}: it is the name of pods, or a label of nodes, as it is"
            )
    return options.label_selector


def _check(config: ServiceConfig) -> None:
    """Refuse what the pods' ports and probes could not follow."""
    if config.port != POD_PORT:
        raise InvalidParameterError("port", f"port: the pods' port is {POD_PORT}: leave it out; a Service may map it")
    if config.tls.model_fields_set:
        raise InvalidParameterError(
            "tls", "tls: KubeRay and the probes speak HTTP: leave it out, and end TLS at the gateway"
        )


def _flow(value: object) -> str:
    """YAML in a line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).rstrip("\n")
