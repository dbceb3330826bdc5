"""JSON schemas at random: nested, bounded, with optional and extra properties, in alternatives, recursive."""

from __future__ import annotations

import json
import random
from datetime import date
from itertools import cycle
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker, ValidationError

from specdec.core.grammar import Grammar

Schema = dict[str, Any]
_WORDS = ("id", "name", "kind", "size", "tags", "unit", "note", "parts", "when", "user")
_PATTERNS = ("^[A-Z]{2}[0-9]{1,3}$", "^(low|mid|high)$", "^[a-f0-9]{4}$", "^v[0-9]\\.[0-9]$")
_FORMATS = ("date", "uuid", "ipv4")
_CHECKER = FormatChecker(("uuid", "ipv4"))


@_CHECKER.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """RFC 3339 has a year 0, Python has none."""
    return not isinstance(value, str) or bool(date.fromisoformat(value.replace("0000-", "0004-", 1)))


def make_schemas(count: int, seed: int = 0) -> list[Schema]:
    """That many different schemas, the same for the same seed; each kind of schema is among the first 16."""
    rng = random.Random(seed)
    kinds = (
        _object,
        _array,
        _union,
        _levels,
        _extra_properties,
        _enum,
        _number,
        _string,
        _tree,
        _named_by_pattern,
        _tuple,
        _tagged,
        _integer,
        _intersection,
        _nullable,
        _referring,
    )
    found: dict[str, Schema] = {}
    for kind in cycle(kinds):
        if len(found) == count:
            return list(found.values())
        schema = kind(rng, 2)
        found.setdefault(json.dumps(schema), schema)
    raise AssertionError("not reached")


def grammar_of(schema: Schema) -> Grammar:
    """The grammar of a schema."""
    return Grammar("json_schema", json.dumps(schema))


def is_valid(schema: Schema, text: str) -> bool:
    """Whether a text is JSON and valid, its formats too."""
    try:
        Draft202012Validator(schema, format_checker=_CHECKER).validate(json.loads(text))
    except (json.JSONDecodeError, ValidationError):
        return False
    return True


def _any(rng: random.Random, depth: int) -> Schema:
    kinds = [_enum, _number, _string, _integer, _simple, _nullable]
    if depth > 0:
        kinds += [_object, _array, _union]
    return rng.choice(kinds)(rng, depth)


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _object(rng: random.Random, depth: int) -> Schema:
    """Some of its properties are optional."""
    names = rng.sample(_WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.6]
    return _closed({name: _any(rng, depth - 1) for name in names}, required)


def _extra_properties(rng: random.Random, depth: int) -> Schema:
    """Extra properties have values of their own kind; there are not many in all."""
    known: Schema = {"properties": {"id": _integer(rng, 0)}, "required": ["id"]} if rng.random() < 0.5 else {}
    extra = {"enum": [0, None, "x"]}
    return {"type": "object", "additionalProperties": extra, "minProperties": 1, "maxProperties": 2} | known


def _named_by_pattern(rng: random.Random, depth: int) -> Schema:
    patterns = {"^x[0-9]$": _simple(rng, 0), "^y[a-c]{1,2}$": _integer(rng, 0)}
    bounds = {"minProperties": 1, "maxProperties": rng.randint(1, 3)}
    return {"type": "object", "patternProperties": patterns, "additionalProperties": False} | bounds


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    first = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    others = rng.choice(({"items": False}, {"items": _simple(rng, 0), "maxItems": len(first) + 2}))
    return {"type": "array", "prefixItems": first, "minItems": rng.randint(0, len(first))} | others


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1), {"type": "null"}, _object(rng, depth - 1)]}


def _tagged(rng: random.Random, depth: int) -> Schema:
    """Exactly one of several objects, told apart by a constant."""
    names = rng.sample(_WORDS, 3)
    return {"oneOf": [_closed({"type": {"const": name}, name: _any(rng, 0)}, ["type", name]) for name in names]}


def _intersection(rng: random.Random, depth: int) -> Schema:
    low, (one, two) = rng.randint(0, 90), rng.sample(_WORDS, 2)
    bounds = ({"minimum": low}, {"maximum": low + 9})
    both = _closed({one: {"allOf": [{"type": "integer"}, *bounds]}, two: {"allOf": [_string(rng, 0)]}}, [one])
    return {"allOf": [both, {"required": [two]}]}


def _levels(rng: random.Random, depth: int) -> Schema:
    """A list whose depth is bounded by names for each level."""
    levels = rng.randint(2, 4)
    definitions: Schema = {"level0": {"type": "null"}}
    for i in range(1, levels):
        below = {"anyOf": [{"$ref": f"#/$defs/level{i - 1}"}, {"type": "null"}]}
        definitions[f"level{i}"] = _closed({"value": _integer(rng, 0), "next": below}, ["value"])
    return {"$ref": f"#/$defs/level{levels - 1}", "$defs": definitions}


def _tree(rng: random.Random, depth: int) -> Schema:
    """It refers to itself: a bounded number of children each."""
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": rng.randint(1, 2)}
    node = _closed({"value": _any(rng, 0), "children": children}, ["value"])
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _referring(rng: random.Random, depth: int) -> Schema:
    """One definition in several places."""
    properties = {name: {"$ref": "#/$defs/part"} for name in rng.sample(_WORDS, 2)}
    return _closed(properties, list(properties)) | {"$defs": {"part": _any(rng, depth - 1)}}


def _enum(rng: random.Random, depth: int) -> Schema:
    values = ["red", "green", 'a "quoted" one', 7, None, True, "naïve", [1, 2], 1.5, {"a": "b"}]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    if rng.random() < 0.3:
        return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1, "multipleOf": 0.25}
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 500), "multipleOf": 0.5}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    kind = rng.random()
    if kind < 0.2:
        return {"type": "integer", "minimum": low, "maximum": low + 100, "multipleOf": 5}
    key = "exclusiveMaximum" if kind < 0.5 else "maximum"
    return {"type": "integer", "minimum": low, key: low + rng.randint(2, 500)}


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind < 0.4:
        return {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": rng.randint(3, 8)}
    if kind < 0.55:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _nullable(rng: random.Random, depth: int) -> Schema:
    return {"type": ["string", "null", "boolean"], "maxLength": rng.randint(1, 6)}


def _simple(rng: random.Random, depth: int) -> Schema:
    return rng.choice(({"type": "boolean"}, {"const": "fixed"}, {"type": "null"}, {"const": {"a": [1, None]}}))
