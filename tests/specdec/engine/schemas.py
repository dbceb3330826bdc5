"""JSON schemas at random: nested, bounded, optional, in alternatives, recursive to a depth."""

from __future__ import annotations

import json
import random
from typing import Any

from specdec.sampling.grammar import Grammar

_WORDS = ("id", "name", "kind", "size", "tags", "unit", "note", "parts", "when", "user")
_PATTERNS = ("^[A-Z]{2}[0-9]{1,3}$", "^(low|mid|high)$", "^[a-f0-9]{4}$", "^v[0-9]\\.[0-9]$")
_FORMATS = ("date", "uuid", "ipv4")


def make_schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """That many schemas, the same for the same seed; each kind of schema is among the first 16."""
    rng = random.Random(seed)
    kinds = (_object, _array, _union, _recursive, _open_object, _enum, _number, _string)
    return [kinds[i % len(kinds)](rng, 2) for i in range(count)]


def grammar_of(schema: dict[str, Any]) -> Grammar:
    """The grammar of a schema."""
    return Grammar("json_schema", json.dumps(schema))


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_enum, _number, _string, _integer, _simple]
    if depth > 0:
        kinds += [_object, _array, _union]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: _any(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _open_object(rng: random.Random, depth: int) -> dict[str, Any]:
    """Extra properties have values of their own kind; at most two properties in all."""
    extra = {"enum": [0, None, "x"]}
    return {"type": "object", "additionalProperties": extra, "minProperties": 1, "maxProperties": 2} | (
        {"properties": {}} if rng.random() < 0.5 else {}
    )


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1), {"type": "null"}, _object(rng, depth - 1)]}


def _recursive(rng: random.Random, depth: int) -> dict[str, Any]:
    """A tree whose depth is bounded by names for each level."""
    levels = rng.randint(2, 4)
    tree: dict[str, Any] = {"type": "null"}
    definitions: dict[str, Any] = {"level0": tree}
    for i in range(1, levels):
        below = {"anyOf": [{"$ref": f"#/$defs/level{i - 1}"}, {"type": "null"}]}
        properties = {"value": _integer(rng, 0), "next": below}
        definitions[f"level{i}"] = {
            "type": "object",
            "properties": properties,
            "required": ["value"],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/level{levels - 1}", "$defs": definitions}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "green", 'a "quoted" one', 7, None, True, "naïve", [1, 2], 1.5]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 500), "multipleOf": 0.5}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    exclusive = rng.random() < 0.3
    key = "exclusiveMaximum" if exclusive else "maximum"
    return {"type": "integer", "minimum": low, key: low + rng.randint(2, 500)}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind < 0.5:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(({"type": "boolean"}, {"const": "fixed"}, {"type": "null"}))
