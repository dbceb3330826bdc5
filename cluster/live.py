"""Keys that change without a restart: they decide no token, and reach replicas as Serve's ``user_config``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cluster.config import AppArgs
from cluster.config_files import merged
from cluster.strict import unknown_key, validated
from specdec.errors import InvalidParameterError

LIVE_KEYS = (
    "limits",
    "protocol",
    "way",
    "num_branches",
    "affinity_slack",
    "stream_interval",
    "unknown_fields",
    "unsupported_tools",
    "log_level",
)
"""Keys and sections of the configuration that a ``user_config`` may change."""


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
        if key not in LIVE_KEYS:
            raise InvalidParameterError(
                key,
                f"user_config: {key} cannot change without a restart, as {', '.join(LIVE_KEYS)} can; put it in args",
            )
        if isinstance(value, Mapping):
            changes |= {f"{key}.{name}": one for name, one in value.items()}
        else:
            changes[key] = value
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
