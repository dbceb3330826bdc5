"""The service's configuration as Serve takes it on a cluster: for ``serve deploy``, and KubeRay's ``serveConfigV2``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.config.app import AppArgs, ServiceConfig, is_loopback
from cluster.config.environment import RAY_SETTINGS
from cluster.config.live import without_live
from cluster.config.replicas import most, scaling
from cluster.launch.drain import INGRESS
from cluster.launch.local import APPLICATION, APPLICATION_NAME, LOADERS, STATUS, STATUS_PARTS, status_args
from specdec.core.errors import InvalidParameterError

ROUTER = "SpeculationRouter"
EVERY_ADDRESS = "0.0.0.0"
DRAFT_APPLICATION = "deployments.app:build_draft_pool"
DRAFT_APPLICATION_NAME = f"{APPLICATION_NAME}-draft"
_BY_DEPLOYMENT = ("actors", "replicas", "updates")
"""Sections with a key for each deployment."""
_OF_SERVICE = ("method", "heads", "tree_tokens")
"""Keys of ``draft`` that the target goes by where the draft model is another application's."""
_OF_DRAFT = ("model", "revision")
"""Keys of ``target`` that a draft model is checked against."""


def serve_config(config: ServiceConfig) -> dict[str, Any]:
    """What ``serve deploy`` takes, as plain data.

    Serve restarts every replica where the builder's ``args`` change. So all that can change without that is under
    ``deployments``: keys in each deployment's ``user_config``, numbers of replicas as Serve's own options.

    Raises:
        InvalidParameterError: A key means this machine alone, or is a secret, which the cluster would show.
    """
    _check(config)
    args = config.model_copy(update={"host": EVERY_ADDRESS}).app_args()
    drafters = []
    if config.separate_draft:
        args, of_draft = _separated(args)
        drafters = [_draft_application(of_draft)]
    target, draft = LOADERS
    deployments = {"ingress": INGRESS, "router": ROUTER, "target": target, "draft": draft}
    if not args.has_own_draft:
        del deployments["draft"]
    application = {"name": APPLICATION_NAME, "route_prefix": "/", "import_path": APPLICATION}
    application |= _args_and_deployments(args, deployments)
    host = config.host if "host" in config.model_fields_set else EVERY_ADDRESS
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": config.port, **config.tls.http_options()},
        "logging_config": {"encoding": config.log_format.upper(), "enable_access_log": False},
        "applications": [application, *drafters, *(_status_application(part, config) for part in STATUS_PARTS)],
    }


def _args_and_deployments(args: AppArgs, deployments: dict[str, str]) -> dict[str, Any]:
    fixed, live = without_live(args.model_dump(mode="json", exclude_unset=True))
    fixed.pop("updates", None)
    if "replicas" in live and not _is_placed(args, deployments):
        models = live["replicas"].keys() & {"target", "draft"}
        fixed |= {"replicas": {part: most(getattr(args.replicas, part)) for part in sorted(models)}} if models else {}
    if "lora" in live:  # their room is fixed, and which there are is not
        fixed.setdefault("lora", {}).setdefault("models", "both" if args.lora.has_twins else "target")
    of_each = [{"name": name, **_own_options(args, part), "user_config": live} for part, name in deployments.items()]
    return {"args": fixed, "deployments": of_each}


def _draft_application(args: AppArgs) -> dict[str, Any]:
    """The draft model's own application; see :func:`deployments.app.build_draft_pool`."""
    _, draft = LOADERS
    found = _args_and_deployments(args, {"draft": draft})
    found["args"]["applications"] = [APPLICATION_NAME]
    return {"name": DRAFT_APPLICATION_NAME, "route_prefix": None, "import_path": DRAFT_APPLICATION, **found}


def _separated(args: AppArgs) -> tuple[AppArgs, AppArgs]:
    """The arguments of the service and of its draft model: what one model's keys say is not in the other's.

    Raises:
        InvalidParameterError: There is no draft model, or it is not said who gets which devices.
    """
    key = "separate_draft"
    if not args.has_own_draft:
        raise InvalidParameterError(key, f"{key}: there is no draft model: leave it out, or name one")
    if args.actors.target.num_gpus is None or args.actors.draft.num_gpus is None:
        text = f"{key}: two applications share no devices out: set actors.target.num_gpus and actors.draft.num_gpus"
        raise InvalidParameterError(key, text)
    service = args.model_dump(mode="json", exclude_unset=True)
    drafters = dict(service)
    for section in _BY_DEPLOYMENT:
        parts = service.pop(section, {})
        drafters[section] = {"draft": parts.pop("draft")} if "draft" in parts else {}
        service[section] = parts
    draft, target = service.get("draft", {}), drafters.get("target", {})
    service["draft"] = {"pool": DRAFT_APPLICATION_NAME} | {name: draft[name] for name in _OF_SERVICE if name in draft}
    drafters["target"] = {name: target[name] for name in _OF_DRAFT if name in target}
    return AppArgs.model_validate(_filled(service)), AppArgs.model_validate(_filled(drafters))


def _filled(sections: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sections.items() if value != {}}


def node_environment(config: ServiceConfig) -> dict[str, str]:
    """Variables that every node of the cluster needs, before Ray starts there."""
    return RAY_SETTINGS | config.tracing.variables()


def _own_options(args: AppArgs, part: str) -> dict[str, Any]:
    """Options of one deployment that the configuration names, and that restart none of its replicas."""
    options = scaling(getattr(args.replicas, part), part) if part in args.replicas.model_fields_set else {}
    if part in args.updates.model_fields_set and getattr(args.updates, part) != "auto":
        options["max_surge_percent"] = 100 if getattr(args.updates, part) == "surge" else 0
    return options


def _is_placed(args: AppArgs, deployments: Iterable[str]) -> bool:
    """Whether no model's share of a device depends on how many replicas there are."""
    models = [getattr(args.actors, part) for part in ("target", "draft") if part in deployments]
    return all(one.num_gpus is not None and one.num_cpus is not None for one in models)


def _status_application(part: str, config: ServiceConfig) -> dict[str, Any]:
    """One of the applications that tell of the service; its replica runs where the ingress may."""
    application: dict[str, Any] = {
        "name": f"{APPLICATION_NAME}-{part}",
        "route_prefix": f"/{part}",
        "import_path": f"{STATUS}:build_{part}",
        "args": status_args(config) | ({"draft_pool": DRAFT_APPLICATION_NAME} if config.separate_draft else {}),
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
    if config.draft.pool is not None:
        raise InvalidParameterError(
            "draft.pool", "draft.pool: this is one application; write several into one Serve configuration by hand"
        )
    if "host" in config.model_fields_set and config.host not in (EVERY_ADDRESS, "::"):
        what = "nobody else reaches it" if is_loopback(config.host) else "every node would listen on it"
        raise InvalidParameterError("host", f"host: {config.host}: {what}: leave it out, or give {EVERY_ADDRESS}")
    if config.port == 0:
        raise InvalidParameterError("port", "port: 0 takes any port, on each node another one: give one")
