"""The service's configuration as Serve takes it on a cluster: for ``serve deploy``, and KubeRay's ``serveConfigV2``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

from cluster.config.app import AppArgs, ServiceConfig, is_loopback
from cluster.config.environment import DRAIN_VARIABLE, RAY_SETTINGS
from cluster.config.live import without_live
from cluster.config.names import (
    APPLICATION,
    APPLICATION_NAME,
    DRAFT,
    DRAFT_APPLICATION,
    DRAFT_APPLICATION_NAME,
    INGRESS,
    ROUTER,
    STATUS,
    STATUS_PARTS,
    TARGET,
)
from cluster.config.replicas import scaling
from cluster.launch.applications import of_draft, of_service
from cluster.launch.local import serves_log, status_args
from cluster.launch.placement import gpus_per_replica
from specdec.core.errors import InvalidParameterError

EVERY_ADDRESS = "0.0.0.0"


def serve_config(config: ServiceConfig) -> dict[str, Any]:
    """What ``serve deploy`` takes, as plain data.

    Serve restarts every replica where the builder's ``args`` change. So all that can change without that is under
    ``deployments``: keys in each deployment's ``user_config``, numbers of replicas as Serve's own options.

    Raises:
        InvalidParameterError: A key means this machine alone, or is a secret, which the cluster would show.
    """
    _check(config)
    config = placed(config)
    args = config.model_copy(update={"host": EVERY_ADDRESS}).app_args()
    host = config.host if "host" in config.model_fields_set else EVERY_ADDRESS
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": config.port, **config.tls.http_options()},
        "logging_config": serves_log(config),
        "applications": [
            _service_application(of_service(args)),
            *([_draft_application(args)] if args.has_own_draft else []),
            *(_status_application(part, config) for part in STATUS_PARTS),
        ],
    }


def placed(config: ServiceConfig) -> ServiceConfig:
    """Say of each model's replicas how many GPUs and cores one takes: each application sees its own keys alone."""
    actors = config.model_dump(exclude_unset=True).get("actors", {})
    for role, model in (("target", config.target), *((("draft", config.draft),) if config.has_own_draft else ())):
        options = getattr(config.actors, role)
        demand = gpus_per_replica(role, model, options)
        num_gpus = 1.0 if demand.num_gpus is None else demand.num_gpus
        actors[role] = {"num_gpus": num_gpus, "num_cpus": 1.0} | actors.get(role, {})
    return ServiceConfig.model_validate(config.model_dump(exclude_unset=True) | {"actors": actors})


def _service_application(args: AppArgs) -> dict[str, Any]:
    fixed, live = without_live(args.model_dump(mode="json", exclude_unset=True))
    fixed.pop("updates", None)
    if "lora" in live:  # their room is fixed, and which there are is not
        fixed.setdefault("lora", {}).setdefault("models", "both" if args.lora.has_draft_adapters else "target")
    parts = {"ingress": INGRESS, "router": ROUTER, "target": TARGET}
    of_each = [{"name": name, **_own_options(args, part), "user_config": live} for part, name in parts.items()]
    application = {"name": APPLICATION_NAME, "route_prefix": "/", "import_path": APPLICATION}
    return application | {"args": fixed, "deployments": of_each}


def _draft_application(args: AppArgs) -> dict[str, Any]:
    """The draft model's own application; see :func:`deployments.app.build_draft`."""
    fixed, config = of_draft(AppArgs.model_validate(args.model_dump(mode="json", exclude_unset=True)))
    for section in ("replicas", "updates"):
        fixed.pop(section, None)
    return {
        "name": DRAFT_APPLICATION_NAME,
        "route_prefix": None,
        "import_path": DRAFT_APPLICATION,
        "args": fixed,
        "deployments": [{"name": DRAFT, **_own_options(args, "draft"), "user_config": config}],
    }


_REPLACEMENT_S = 60
"""How long replicas of a node that drains serve on while Serve starts others in their place; then they are stopped.

Serve stops a replica when ``drain_timeout_s`` are left of the node's time: had the node no more than that, at once.
"""
_KILL_S = 10
"""From the end of a node's drain until its processes are killed; Ray ends them in that time."""


def node_drain_s(drain_timeout_s: float) -> int:
    """Return how long a node may drain after SIGTERM: ``ray start --block`` ends it sooner if it is idle sooner."""
    return math.ceil(drain_timeout_s) + _REPLACEMENT_S


def pod_grace_s(drain_timeout_s: float) -> int:
    """Return the ``terminationGracePeriodSeconds`` of every pod."""
    return node_drain_s(drain_timeout_s) + _KILL_S


def node_environment(config: ServiceConfig) -> dict[str, str]:
    """Variables that every node of the cluster needs, before Ray starts there."""
    drain = {DRAIN_VARIABLE: str(node_drain_s(config.drain_timeout_s))}
    return RAY_SETTINGS | drain | config.tracing.variables()


def _own_options(args: AppArgs, part: str) -> dict[str, Any]:
    """Options of one deployment that the configuration names, and that restart none of its replicas."""
    options = scaling(getattr(args.replicas, part), part) if part in args.replicas.model_fields_set else {}
    if part in args.updates.model_fields_set and getattr(args.updates, part) != "auto":
        options["max_surge_percent"] = 100 if getattr(args.updates, part) == "surge" else 0
    return options


def _status_application(part: str, config: ServiceConfig) -> dict[str, Any]:
    """One of the applications that tell of the service; its replica runs where the ingress may."""
    application: dict[str, Any] = {
        "name": f"{APPLICATION_NAME}-{part}",
        "route_prefix": f"/{part}",
        "import_path": f"{STATUS}:build_{part}",
        "args": status_args(config, [DRAFT_APPLICATION_NAME] if config.has_own_draft else []),
    }
    if labels := config.actors.ingress.label_selector:
        options = {"num_cpus": 0, "label_selector": dict(labels)}
        application["deployments"] = [{"name": part.capitalize(), "ray_actor_options": options}]
    return application


def _check(config: ServiceConfig) -> None:
    for key, model in (("target.token", config.target), ("draft.token", config.draft)):
        if model.token is not None:
            raise InvalidParameterError(
                key,
                f"{key}: a cluster would show it: leave it out, and set HF_TOKEN on every node (on Kubernetes by the "
                "Secret specdec-hub)",
            )
    if config.draft.application is not None:
        text = "draft.application: this is one pair; write several into one Serve configuration by hand"
        raise InvalidParameterError("draft.application", text)
    if "host" in config.model_fields_set and config.host not in (EVERY_ADDRESS, "::"):
        what = "nobody else reaches it" if is_loopback(config.host) else "every node would listen on it"
        raise InvalidParameterError("host", f"host: {config.host}: {what}: leave it out, or give {EVERY_ADDRESS}")
    if config.port == 0:
        raise InvalidParameterError("port", "port: 0 takes any port, on each node another one: give one")


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one; where both have a key, ``above`` counts, section by section."""
    result = dict(below)
    for key, value in above.items():
        old = below.get(key)
        result[key] = laid_over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def as_yaml(content: dict[str, Any]) -> str:
    """Return a mapping as YAML, with what occurs twice written twice."""
    return yaml.dump(content, Dumper=_WithoutAliases, sort_keys=False, width=118, allow_unicode=True)


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Never an alias."""
        return True
