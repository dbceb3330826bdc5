"""Keys that change without a restart: they decide no token, and reach replicas as Serve's ``user_config``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cluster.config.app import AppArgs
from cluster.config.base import unknown_key, validated
from cluster.config.files import merged
from specdec.core.errors import InvalidParameterError

LIVE_KEYS = (
    "limits",
    "protocol",
    "speculation_mode",
    "num_branches",
    "affinity_slack",
    "stream_interval",
    "unknown_fields",
    "unsupported_tools",
    "log_level",
    "replicas",
    "lora.adapters",
    "access.api_keys_file",
    "access.admin_keys",
    "access.allowed_origins",
    "recordings",
)
"""Keys and sections of the configuration that a ``user_config`` may change."""


def without_live(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration as two: what a change of restarts replicas, and what a ``user_config`` may change."""
    fixed: dict[str, Any] = {}
    live: dict[str, Any] = {}
    for key, value in given.items():
        if key in LIVE_KEYS:
            live[key] = value
        elif any(path.startswith(f"{key}.") for path in LIVE_KEYS):
            parts = {True: live, False: fixed}
            for name, one in value.items():
                parts[f"{key}.{name}" in LIVE_KEYS].setdefault(key, {})[name] = one
        else:
            fixed[key] = value
    return fixed, live


def reconfigured(args: AppArgs, user_config: Mapping[str, Any] | None) -> AppArgs:
    """The configuration that is in force with a deployment's ``user_config``.

    Args:
        args: What the replica was started with.
        user_config: Keys in the place of those of ``args``, of sections only those that differ; None for none.

    Raises:
        InvalidParameterError: For a key that needs a restart or is unknown, or a value that is not allowed.
    """
    changes: dict[str, Any] = {}
    for key, value in (user_config or {}).items():
        if key not in AppArgs.model_fields:
            raise InvalidParameterError(key, f"user_config: {unknown_key(key, LIVE_KEYS)}")
        named = {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, Mapping) else {key: value}
        for path in named:
            if key not in LIVE_KEYS and path not in LIVE_KEYS:
                known = ", ".join(LIVE_KEYS)
                text = f"user_config: {path} cannot change without a restart, as {known} can; put it in args"
                raise InvalidParameterError(path, text)
        changes |= named
    data = args.model_dump(exclude_unset=True)
    return validated(AppArgs, merged(AppArgs, data, changes), "user_config: ")


class _ToServe(logging.Handler):
    """Hands records on to Serve's log."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("ray.serve").handle(record)


def set_log_level(args: AppArgs, serves_level: int | None = None) -> None:
    """Log from now on what the configuration says, in this replica; where it says nothing, Serve's own rule holds.

    What the library logs, of sequences that fail among it, goes to Serve's log, too: Serve keeps its own logger alone.

    Args:
        args: The configuration.
        serves_level: Serve's own rule, to go back to; None where nothing else has held yet.
    """
    serve, library = logging.getLogger("ray.serve"), logging.getLogger("specdec")
    if "log_level" in args.model_fields_set:
        serve.setLevel(args.log_level.upper())
    elif serves_level is not None:
        serve.setLevel(serves_level)
    library.setLevel(serve.getEffectiveLevel())
    library.handlers = [_ToServe()]
