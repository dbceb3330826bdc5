"""Reduces a CustomResourceDefinition to the schema of one version, without descriptions.

Usage: ``python -m tests.k8s.slim_crd SOURCE VERSION DESTINATION``. The result validates as the whole file does:
descriptions say nothing that is checked, and the API server checks an object against its own version alone. Parts that
occur several times, as a pod's template does, are written once, and referred to by YAML's aliases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.crd_schema import load_definition

_MIN_SHARED_CHARACTERS = 400
_NAMES_TO_SCHEMAS = ("properties", "definitions", "patternProperties")


def without_descriptions(schema: Any) -> Any:
    """The same schema; a property that is called ``description`` stays."""
    if isinstance(schema, list):
        return [without_descriptions(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, part in schema.items():
        if key in _NAMES_TO_SCHEMAS and isinstance(part, dict):
            result[key] = {name: without_descriptions(inner) for name, inner in part.items()}
        elif key != "description":
            result[key] = without_descriptions(part)
    return result


def shared(value: Any, known: dict[str, Any]) -> Any:
    """The same value, equal parts of which are one object, so that YAML writes them once."""
    if isinstance(value, list):
        value = [shared(part, known) for part in value]
    elif isinstance(value, dict):
        value = {key: shared(part, known) for key, part in value.items()}
    text = json.dumps(value, sort_keys=True)
    return known.setdefault(text, value) if len(text) >= _MIN_SHARED_CHARACTERS else value


def slim(definition: dict[str, Any], version: str) -> dict[str, Any]:
    """The definition with one version, of which the schema is kept."""
    names = {key: definition["spec"][key] for key in ("group", "names", "scope")}
    (found,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == version]
    schema = without_descriptions(found["schema"])
    schema["openAPIV3Schema"]["properties"].pop("status", None)  # the operator writes it, no manifest does
    kept = {"name": version, "schema": shared(schema, {})}
    heading = {key: definition[key] for key in ("apiVersion", "kind")}
    return heading | {"metadata": {"name": definition["metadata"]["name"]}, "spec": names | {"versions": [kept]}}


def main() -> None:
    """Read the arguments, and write the file."""
    source, version, destination = sys.argv[1:]
    text = yaml.safe_dump(slim(load_definition(Path(source)), version), sort_keys=True, width=118)
    Path(destination).write_text(text)


if __name__ == "__main__":
    main()
