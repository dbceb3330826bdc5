"""The service's configuration as Serve takes it on a cluster: for ``serve deploy``, and KubeRay's ``serveConfigV2``."""

from __future__ import annotations

from typing import Any

from cluster.config import AppArgs, ServiceConfig, is_loopback
from cluster.drain import INGRESS
from cluster.launch import APPLICATION, APPLICATION_NAME, LOADERS, STATUS, STATUS_PARTS, status_args
from cluster.live import LIVE_KEYS
from cluster.settings import RAY_SETTINGS
from specdec.errors import InvalidParameterError

ROUTER = "SpeculationRouter"
EVERY_ADDRESS = "0.0.0.0"


def serve_config(config: ServiceConfig) -> dict[str, Any]:
    """What ``serve deploy`` takes, as plain data.

    Keys that can change without a restart are in each deployment's ``user_config``, all others in the builder's
    ``args``.

    Raises:
        InvalidParameterError: A key means this machine alone, or is a secret, which the cluster would show.
    """
    _check(config)
    args = config.model_copy(update={"host": EVERY_ADDRESS}).app_args()
    given = args.model_dump(mode="json", exclude_unset=True)
    live = {key: given.pop(key) for key in LIVE_KEYS if key in given}
    target, draft = LOADERS
    deployments = [INGRESS, ROUTER, target, *([draft] if args.has_own_draft else [])]
    application = {
        "name": APPLICATION_NAME,
        "route_prefix": "/",
        "import_path": APPLICATION,
        "args": given,
        "deployments": [{"name": name, "user_config": live} for name in deployments],
    }
    host = config.host if "host" in config.model_fields_set else EVERY_ADDRESS
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": config.port, **config.tls.http_options()},
        "logging_config": {"encoding": config.log_format.upper(), "enable_access_log": False},
        "applications": [application, *(_status_application(part, args) for part in STATUS_PARTS)],
    }


def node_environment(config: ServiceConfig) -> dict[str, str]:
    """Variables that every node of the cluster needs, before Ray starts there."""
    return RAY_SETTINGS | config.tracing.variables()


def _status_application(part: str, args: AppArgs) -> dict[str, Any]:
    """One of the applications that tell of the service; its replica runs where the ingress may."""
    application: dict[str, Any] = {
        "name": f"{APPLICATION_NAME}-{part}",
        "route_prefix": f"/{part}",
        "import_path": f"{STATUS}:build_{part}",
        "args": status_args(args),
    }
    if labels := args.actors.ingress.label_selector:
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
