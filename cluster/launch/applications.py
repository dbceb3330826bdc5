"""One configuration as two Serve applications: the service, and the draft model of its own.

Serve restarts every deployment of an application whose arguments change: so what changes apart is deployed apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.app import AppArgs
from cluster.config.base import validated
from cluster.config.limits import names
from cluster.config.live import without_live
from cluster.config.models import DraftConfig
from cluster.config.names import APPLICATION_NAME, DRAFT_APPLICATION_NAME

_BY_DEPLOYMENT = ("actors", "replicas", "updates")
"""Sections with a key for each deployment."""
_TARGET_KEYS = ("model", "revision", "token")
"""What a draft model's tokenizer is checked against."""
_LIVE_KEYS = ("protocol", "log_level")
"""What a drafter takes of the keys that change without a restart."""
_DRAFT_KEYS = (
    *("demo", "draft", "served_model_name", "access", "lora", "logits_processors", "backend", "executor"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "gpu_memory_utilization"),
    *("num_speculative_tokens", "skip_parity_check", "step_timeout_s", "drain_timeout_s", "log_format"),
)
"""Keys and sections that a drafter goes by, beside its own part of those of :data:`_BY_DEPLOYMENT`."""


def of_service(args: AppArgs) -> AppArgs:
    """The arguments of the service's application: of its draft model they name the application alone."""
    if not args.has_own_draft:
        return args
    data = args.model_dump(exclude_unset=True)
    draft = data.get("draft", {})
    data["draft"] = {name: draft[name] for name in DraftConfig.of_application if name in draft}
    data["draft"]["application"] = DRAFT_APPLICATION_NAME
    for section in ("actors", "updates"):  # how many drafters there are in any case is known to routers
        data.get(section, {}).pop("draft", None)
    return AppArgs.model_validate({key: value for key, value in data.items() if value != {}})


def of_draft(args: AppArgs) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the draft model's application, and its ``user_config``.

    The target is in the latter: where another revision has the same vocabulary, the drafter stays as it is.
    """
    data = args.model_dump(exclude_unset=True)
    fixed, live = without_live({key: data[key] for key in (*_DRAFT_KEYS, *_LIVE_KEYS) if key in data})
    if "draft" in fixed:
        fixed["draft"] = {
            name: value for name, value in fixed["draft"].items() if name not in DraftConfig.of_application
        }
    access = fixed.pop("access", {})
    if "allow_unauthenticated_ray" in access:
        fixed["access"] = {"allow_unauthenticated_ray": access["allow_unauthenticated_ray"]}
    for section in _BY_DEPLOYMENT:
        if "draft" in data.get(section, {}):
            fixed[section] = {"draft": data[section]["draft"]}
    if "lora" in fixed and "adapters" in data["lora"]:  # their room is fixed, and which there are is not
        fixed["lora"].setdefault("models", "both" if args.lora.has_draft_adapters else "target")
    target = {key: data["target"][key] for key in _TARGET_KEYS if key in data.get("target", {})}
    config = {"applications": [APPLICATION_NAME], "target": target}
    fixed = {key: value for key, value in fixed.items() if value != {}}
    return fixed, config | {key: live[key] for key in _LIVE_KEYS if key in live}


def draft_args(args: Mapping[str, Any], user_config: Mapping[str, Any]) -> tuple[AppArgs, tuple[str, ...]]:
    """What a drafter goes by, and the names of the applications that it drafts for.

    Args:
        args: Of the draft model's application.
        user_config: Of its deployment.

    Raises:
        InvalidParameterError: A key is unknown or has a value that is not allowed.
    """
    live = dict(user_config)
    applications = names(live.pop("applications", ()))
    return validated(AppArgs, {**args, **live}, "draft: "), tuple(applications)
