"""The service's configuration as Serve takes it on a cluster: for ``serve deploy``, and KubeRay's ``serveConfigV2``.

The overlays for KubeRay that come with specdec, and a copy of one that stands alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.config.app import AppArgs, ServiceConfig, is_loopback
from cluster.config.environment import RAY_SETTINGS
from cluster.config.files import read_yaml
from cluster.config.live import without_live
from cluster.config.names import (
    APPLICATION,
    APPLICATION_NAME,
    DRAFT,
    DRAFT_APPLICATION,
    INGRESS,
    ROUTER,
    STATUS,
    STATUS_PARTS,
    TARGET,
)
from cluster.config.replicas import most, scaling
from cluster.launch.local import serves_log, status_args
from specdec.core.errors import InvalidParameterError

EVERY_ADDRESS = "0.0.0.0"
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
    deployments = {"ingress": INGRESS, "router": ROUTER, "target": TARGET, "draft": DRAFT}
    if not args.has_own_draft:
        del deployments["draft"]
    application = {"name": APPLICATION_NAME, "route_prefix": "/", "import_path": APPLICATION}
    application |= _args_and_deployments(args, deployments)
    host = config.host if "host" in config.model_fields_set else EVERY_ADDRESS
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": config.port, **config.tls.http_options()},
        "logging_config": serves_log(config),
        "applications": [application, *drafters, *(_status_application(part, config) for part in STATUS_PARTS)],
    }


def _args_and_deployments(args: AppArgs, deployments: dict[str, str]) -> dict[str, Any]:
    fixed, live = without_live(args.model_dump(mode="json", exclude_unset=True))
    fixed.pop("updates", None)
    if "replicas" in live and not _is_placed(args, deployments):
        models = live["replicas"].keys() & {"target", "draft"}
        fixed |= {"replicas": {part: most(getattr(args.replicas, part)) for part in sorted(models)}} if models else {}
    if "lora" in live:  # their room is fixed, and which there are is not
        fixed.setdefault("lora", {}).setdefault("models", "both" if args.lora.has_draft_adapters else "target")
    of_each = [{"name": name, **_own_options(args, part), "user_config": live} for part, name in deployments.items()]
    return {"args": fixed, "deployments": of_each}


def _draft_application(args: AppArgs) -> dict[str, Any]:
    """The draft model's own application; see :func:`deployments.app.build_draft_pool`."""
    found = _args_and_deployments(args, {"draft": DRAFT})
    found["args"]["applications"] = [APPLICATION_NAME]
    return {"name": DRAFT_APPLICATION_NAME, "route_prefix": None, "import_path": DRAFT_APPLICATION, **found}


def _separated(args: AppArgs) -> tuple[AppArgs, AppArgs]:
    """The arguments of the service and of its draft model: what one model's keys say is not in the other's.

    Raises:
        InvalidParameterError: There is no draft model, or it is not said who gets which devices.
    """
    key = "separate_draft"
    if args.is_paired:
        raise InvalidParameterError(key, f"{key}: draft.placement: same_process has it in the target's: leave one out")
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
        text = "draft.pool: this is one application; write several into one Serve configuration by hand"
        raise InvalidParameterError("draft.pool", text)
    if "host" in config.model_fields_set and config.host not in (EVERY_ADDRESS, "::"):
        what = "nobody else reaches it" if is_loopback(config.host) else "every node would listen on it"
        raise InvalidParameterError("host", f"host: {config.host}: {what}: leave it out, or give {EVERY_ADDRESS}")
    if config.port == 0:
        raise InvalidParameterError("port", "port: 0 takes any port, on each node another one: give one")


KUSTOMIZATION = "kustomization.yaml"
COPY = "manifests"
"""Folder, beside the rendered files, of the overlay and of all that it is built on."""
_REFERENCES = ("resources", "components", "transformers", "generators", "validators")
_LEFT_OUT = shutil.ignore_patterns("*.py", "*.pyc", "__pycache__", "*.md")


def overlays() -> Path:
    """The folder of the overlays: in an installed package beside this module, else in the clone."""
    here = Path(__file__).resolve().parents[1]
    installed = here / "k8s" / "overlays"
    return installed if installed.is_dir() else here.parent / "k8s" / "overlays"


def find_overlay(name: str) -> Path:
    """The folder of an overlay, by its path or its name.

    Raises:
        InvalidParameterError: There is none.
    """
    known = overlays()
    for folder in (Path(name), known / name):
        if (folder / KUSTOMIZATION).is_file():
            return folder.resolve()
    names = ", ".join(sorted(folder.name for folder in known.iterdir())) if known.is_dir() else "none"
    raise InvalidParameterError(
        "overlay",
        f"overlay: {name} is no folder with a {KUSTOMIZATION}, and none of those that come with specdec: {names}",
    )


def placement(overlay: Path) -> dict[str, Any]:
    """What an overlay's ``placement.yaml`` says, over what those say that its kustomization begins with."""
    found: dict[str, Any] = {}
    for below in _references(overlay, ("resources",)):
        found = laid_over(found, placement(below))
    own = overlay / "placement.yaml"
    return laid_over(found, read_yaml(own)) if own.exists() else found


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one; where both have a key, ``above`` counts, section by section."""
    result = dict(below)
    for key, value in above.items():
        old = below.get(key)
        result[key] = laid_over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def copy_overlay(overlay: Path, out: Path) -> Path:
    """Copy an overlay, and all that it is built on, into a folder; nothing of the copy points out of it.

    Files that are there are overwritten, and others are left alone.

    Args:
        overlay: Its folder.
        out: Where the rendered files are; the copy is in ``manifests`` there.

    Returns:
        The copy's path, relative to ``out``.
    """
    folders = {overlay.resolve(), *_all_below(overlay.resolve())}
    root = Path(os.path.commonpath(folders))
    copy = (out / COPY).resolve()

    def left_out(folder: str, names: list[str]) -> set[str]:
        is_out = {name for name in names if Path(folder, name).resolve() == out.resolve()}
        return _LEFT_OUT(folder, names) | is_out

    if not overlay.resolve().is_relative_to(copy):  # else it is such a copy itself
        for folder in sorted(folders):
            shutil.copytree(folder, copy / folder.relative_to(root), ignore=left_out, dirs_exist_ok=True)
        return Path(COPY) / overlay.resolve().relative_to(root)
    return overlay.resolve().relative_to(out.resolve())


def kustomization(overlay: Path, path: Path) -> dict[str, Any]:
    """The kustomization that puts the rendered files, and further patches, in the place of an overlay's own.

    Args:
        overlay: Its folder.
        path: Of the overlay as the kustomization is to name it.
    """
    repeated = read_yaml(overlay / KUSTOMIZATION).get("transformers", [])
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [str(path)],
        "configMapGenerator": [
            {"name": "specdec-serve", "behavior": "replace", "files": ["serve.yaml"]},
            {"name": "specdec-environment", "behavior": "replace", "envs": ["environment.env"]},
        ],
        "transformers": [os.path.normpath(path / transformer) for transformer in repeated],
    }


def _all_below(folder: Path) -> Iterator[Path]:
    for below in _references(folder, _REFERENCES):
        yield below
        yield from _all_below(below)


def _references(folder: Path, keys: tuple[str, ...]) -> Iterator[Path]:
    """Folders with a kustomization that one names; files, and what is on the network, are not among them."""
    content = read_yaml(folder / KUSTOMIZATION)
    for key in keys:
        for entry in content.get(key, []):
            if (folder / entry / KUSTOMIZATION).is_file():
                yield (folder / entry).resolve()
