"""Reading a configuration: a YAML file, and flags laid over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ServiceConfig
from cluster.strict import StrictModel, submodel, validated
from specdec.errors import InvalidParameterError


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> ServiceConfig:
    """The configuration of a YAML file with flags laid over it; the defaults where neither says anything.

    Args:
        path: A YAML file, or None.
        overrides: Values by dotted key, such as ``{"target.dtype": "float32"}``; they win over the file.

    Raises:
        InvalidParameterError: For a file that cannot be read, an unknown key (the nearest known one is named), or a
            value out of its range.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = read_yaml(path)
        validated(ServiceConfig, data, f"{path}: ")
    return validated(ServiceConfig, merged(ServiceConfig, data, overrides or {}))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping.

    Raises:
        InvalidParameterError: If it cannot be read, is not YAML, or holds something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("config", f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InvalidParameterError("config", f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InvalidParameterError("config", f"{path}: must hold keys and values, such as 'port: 8000'")
    return data


def merged(model: type[StrictModel], data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with each override put at its dotted key; neither argument is changed."""
    result = dict(data)
    for path, value in overrides.items():
        name, _, rest = path.partition(".")
        section = submodel(model, name) if name in model.model_fields else None
        if section is None or not rest:
            result[path] = value
            continue
        inner = result.get(name)
        inner = {"model": inner} if isinstance(inner, str) else dict(inner or {})
        result[name] = merged(section, inner, {rest: value})
    return result
