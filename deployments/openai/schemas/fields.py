"""Kinds of fields: strict, taken, refused."""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

_MOST_SHOWN = 64


class Body(BaseModel):
    """A request body: a quoted number is not a number, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        """Stop at the first unknown field: a large body could have more of them than one wants to list."""
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name[:_MOST_SHOWN], cls.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise PydanticCustomError("unknown_field", "{hint}", {"field": name[:_MOST_SHOWN], "hint": hint})
        return data


def refused(*allowed: Any) -> AfterValidator:
    """For a field that is known but not supported: only null, or values that change nothing, are taken."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(one) and value == one for one in allowed):
            return value
        raise PydanticCustomError("unsupported_parameter", "is not supported{but}", {"but": but})

    but = f"; only {' or '.join(repr(one) for one in allowed)} is taken" if allowed else ""
    return AfterValidator(check)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """A prompt in each of its four forms, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) or _is_token_list(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt_type", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _bias(value: Any) -> dict[int, float]:
    """Token ids, which JSON can only write as strings, as integers."""
    if not isinstance(value, dict) or not all(_is_token_key(key) and _is_finite(bias) for key, bias in value.items()):
        raise PydanticCustomError("bias_type", "must be an object with token ids, as strings, for keys, and numbers")
    return {int(key): float(bias) for key, bias in value.items()}


def _is_token_key(key: str) -> bool:
    return len(key) < 19 and key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0")


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}

Integer = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Integers = Annotated[list[Integer], Field(fail_fast=True)]
Prompts = Annotated[
    Any,
    AfterValidator(_prompts),
    WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS, "minItems": 1}]}),
]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(fail_fast=True),
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}),
]
Bias = Annotated[
    Any,
    AfterValidator(_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
