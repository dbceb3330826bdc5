"""Kinds of fields, and what becomes of those that are not served."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, ClassVar

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

from deployments.http.schemas.others import REPLACED, Names, is_neutral

_MOST_SHOWN = 64


class Body(BaseModel):
    """A request body, or an object in one: a quoted number is not a number, and fields that are not served are kept.

    Those are found again by :func:`ignored_fields`.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are refused, each with the values that are taken, since they change nothing."""
    replaced: ClassVar[dict[str, str]] = REPLACED
    """Refused fields, and the field to send in their place."""
    taken: ClassVar[frozenset[str]] = frozenset()
    """Fields that are known and ignored."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_matter(cls, data: Any) -> Any:
        """Stop at the first field that is refused: a large body could have more of them than one wants to list."""
        served = _served(cls)
        for name, value in data.items() if isinstance(data, dict) else ():
            if name in served or name in cls.taken:
                continue
            if name in cls.refused_unless:
                _check_neutral(name, value, cls.refused_unless[name], cls.replaced.get(name))
                continue
            near = _names(cls).nearest(name)
            if near is not None:
                raise PydanticCustomError(
                    "unknown_field", "; did you mean {near}?", {"field": name[:_MOST_SHOWN], "near": repr(near)}
                )
        return data


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...], instead: str | None) -> None:
    if is_neutral(value, neutral):
        return
    but = f"; only {' or '.join(repr(one) for one in neutral)} is taken" if neutral else ""
    but += f"; the field to send is {instead}" if instead else ""
    raise PydanticCustomError("refused_field", "is not supported{but}", {"field": name, "but": but})


@cache
def _served(body: type[Body]) -> frozenset[str]:
    """Fields by the names that requests give them."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


@cache
def _names(body: type[Body]) -> Names:
    return Names(_served(body) | frozenset(body.refused_unless) | body.taken)


def ignored_fields(body: Body, path: str = "") -> Iterator[tuple[str, bool]]:
    """Fields of a body, and of the objects in it, that have a value and no effect.

    Yields:
        Its name, with a point between levels, and whether it is a known one. A name may come several times.
    """
    for name, value in (body.model_extra or {}).items():
        is_known = name in body.taken or name in body.refused_unless
        if value is not None or not is_known:
            yield path + name, is_known
    for name, value in body.__dict__.items():
        for part in value if isinstance(value, list) else (value,):
            if not isinstance(part, Body):
                break
            yield from ignored_fields(part, f"{path}{name}.")


def kind_of(value: Any) -> str | None:
    """What a value is, for fields that take several kinds: ``str``, ``list`` or ``dict``; None for all else."""
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "list": list, "dict": (dict, Body)}
    return next((name for name, types in kinds.items() if isinstance(value, types)), None)


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
