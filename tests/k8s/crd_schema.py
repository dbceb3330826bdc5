"""Checking an object against a CustomResourceDefinition as an API server would: defaults first, nothing unknown."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Schema = dict[str, Any]


def load_definition(path: Path) -> dict[str, Any]:
    """A CRD, by libyaml where it is there."""
    return yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def load_schema(path: Path, version: str) -> Schema:
    """The ``openAPIV3Schema`` of one version of a CRD."""
    return schema_of(load_definition(path), version)


def schema_of(definition: dict[str, Any], version: str) -> Schema:
    """The ``openAPIV3Schema`` of one version of a loaded CRD."""
    (found,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == version]
    return found["schema"]["openAPIV3Schema"]


def problems(schema: Schema, instance: dict[str, Any]) -> list[str]:
    """What is wrong with an object, a line each with the path; empty where it is valid."""
    validator = jsonschema.Draft202012Validator(strict(schema))
    errors = validator.iter_errors(with_defaults(schema, instance))
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors)


def with_defaults(schema: Schema, instance: Any) -> Any:
    """A copy of ``instance`` with the schema's defaults filled in, as the API server does before it validates."""
    if isinstance(instance, list):
        return [with_defaults(schema.get("items", {}), item) for item in instance]
    if not isinstance(instance, dict):
        return instance
    result = dict(instance)
    for key, part in schema.get("properties", {}).items():
        if key not in result and "default" in part:
            result[key] = copy.deepcopy(part["default"])
        if key in result:
            result[key] = with_defaults(part, result[key])
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        result |= {key: with_defaults(more, value) for key, value in instance.items()}
    return result


def strict(schema: Schema, is_root: bool = True) -> Schema:
    """The schema in plain JSON Schema, closed against unknown fields; an object's own metadata stays open."""
    result: Schema = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        result["properties"] = {key: strict(part, False) for key, part in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        result["items"] = strict(schema["items"], False)
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(schema["additionalProperties"], False)
    if is_root:
        result["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return result
