"""Reading a configuration: a YAML file, secrets, the environment and flags, each laid over the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from cluster.config.app import NAME_A_MODEL, ServiceConfig
from cluster.config.base import StrictModel, keys_of, submodel, unknown_key, validated
from cluster.config.environment import keys_from_environment
from specdec.core.errors import InvalidParameterError

SECRETS_FOLDER = Path("/run/secrets/specdec")
"""Where containers mount secrets: a file per key, called as the key is: ``target.token``."""


def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    secrets_folder: Path = SECRETS_FOLDER,
) -> ServiceConfig:
    """The configuration that is in force: what wins is the flag, the environment, the secret, the file, the default.

    Args:
        path: A YAML file, or None.
        overrides: Values by dotted key, such as ``{"target.dtype": "float32"}``: the flags.
        secrets_folder: Holds a file per secret key; it need not exist.

    Raises:
        InvalidParameterError: For a file that cannot be read or leaves open whether the demo pair is wanted, an
            unknown key (the nearest known one is named), or a value out of its range.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = read_yaml(path)
        validated(ServiceConfig, data, f"{path}: ")
    for source, values in (
        (str(secrets_folder), _secrets(secrets_folder)),
        ("environment", keys_from_environment()),
    ):
        data = merged(ServiceConfig, data, _read_texts(values, source))
    config = validated(ServiceConfig, merged(ServiceConfig, data, overrides or {}))
    if path is not None:
        check_named(path, config)
    return config


def check_named(path: str | Path, config: ServiceConfig) -> None:
    """Refuse a file that leaves open whether the demo pair is wanted.

    Raises:
        InvalidParameterError: It names neither a target nor the demo pair.
    """
    if config.is_demo and "demo" not in config.model_fields_set:
        raise InvalidParameterError("target", f"{path}: target: names no model; {NAME_A_MODEL}")


def config_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Dotted path and field of every key of the configuration that is no section."""
    return ((path, field) for path, field in keys_of(ServiceConfig) if field is not None)


def text_reader(annotation: Any) -> Callable[[str], Any]:
    """How a value is read that is given as text: mappings and switches as YAML, all else by the key's own check."""
    return yaml.safe_load if annotation is bool or "dict[" in str(annotation) else str


def _read_texts(values: Mapping[str, str], source: str) -> dict[str, Any]:
    known = dict(config_keys())
    for key in values:
        if key not in known:
            raise InvalidParameterError(
                key, f"{source}: {unknown_key(key, (path for path, _ in keys_of(ServiceConfig)))}"
            )
    return {key: text_reader(known[key].annotation)(value) for key, value in values.items()}


def _secrets(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.startswith(".")]
    return {file.name: file.read_text(encoding="utf-8").strip() for file in files}


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
