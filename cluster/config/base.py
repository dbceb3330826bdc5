"""A pydantic base for configuration: every key is known, and every error names the key and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from specdec.core.errors import InvalidParameterError

M = TypeVar("M", bound="StrictModel")

_NEAR = 0.6
"""How alike two keys must be for one to be suggested in place of the other, from 0 to 1."""


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys, at any depth, and names the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        for path, is_known, value in _walk(cls, data):
            if not is_known:
                raise refused_key(path, unknown_key(path, (known for known, _ in keys_of(cls))))
            if isinstance(value, bool):
                raise refused_key(path, f"{path}: true and false are not allowed here")
        return data


def refused_key(key: str, message: str) -> PydanticCustomError:
    """An error that a validator of the whole tree raises for one of its keys."""
    return PydanticCustomError("refused_key", "{text}", {"text": message, "key": key})


def submodel(model: type[BaseModel], name: str) -> type[StrictModel] | None:
    """The model class of the field ``name`` where it is a section of its own, or None."""
    annotation = model.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, StrictModel) else None


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo | None]]:
    """Every key of a model: its dotted path, and its field; None for a section, whose keys follow it."""
    for name, field in model.model_fields.items():
        path, section = prefix + name, submodel(model, name)
        yield path, field if section is None else None
        if section is not None:
            yield from keys_of(section, path + ".")


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values that a key allows, where it names them; else none."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _walk(model: type[BaseModel], data: Any, prefix: str = "") -> Iterator[tuple[str, bool, Any]]:
    """Every key of raw ``data``: its dotted path, whether ``model`` has it, and its value (None for a switch)."""
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        path = f"{prefix}{key}"
        if key not in model.model_fields:
            yield path, False, value
            continue
        annotation = model.model_fields[key].annotation
        yield path, True, None if annotation is bool or "on" in get_args(annotation) else value
        section = submodel(model, key)
        if section is not None:
            yield from _walk(section, value, path + ".")


REMOVED: dict[str, str] = {
    "acceptance": "there is one rule: a seed's text never depends on drafts",
    "draft.pool": "draft.application names the draft model's application",
    "drafters": "a sequence has one drafter; replicas.draft gives another when it dies",
    "extensions": "code of your own reads a file or a variable of its own",
    "numeric_contract_lost": "send exactness: fast with requests that may go on in other bits",
    "store": "responses and adapters are in one actor on the head node; Redis keeps only Ray's own tables",
    "receipts": "to check an answer, send its request again with the same seed",
    "separate_draft": "the draft model always is an application of its own",
}
"""Keys that a configuration had before, and why they left or what to do instead."""


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say of a key that is not among the ``known`` ones, which are dotted paths."""
    if key in REMOVED:
        return f"the key '{key}' was removed: {REMOVED[key]}; take it out"
    near = _nearest(key, known)
    if near == key:
        section, _, leaf = key.rpartition(".")
        return f"unknown key '{key}'; write '{leaf}' under '{section}'"
    return f"unknown key '{key}'" + (f"; did you mean '{near}'?" if near else "")


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """The known dotted path most like ``key``, alike in its last part first, in its section next; None if none is."""
    section, _, leaf = key.rpartition(".")

    def likeness(path: str) -> float:
        return difflib.SequenceMatcher(a=leaf, b=path.rpartition(".")[2]).ratio()

    near = [path for path in known if likeness(path) >= _NEAR]
    return max(near, key=lambda path: likeness(path) + 0.2 * (path.rpartition(".")[0] == section), default=None)


def validated(model: type[M], data: Mapping[str, Any], source: str = "") -> M:
    """Build ``model`` from plain data.

    Args:
        model: The configuration's class.
        data: Keys and values, nested by section.
        source: Where the data comes from; stands before the message.

    Raises:
        InvalidParameterError: With the dotted key as ``parameter``, and what is allowed in the message.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        parameter, message = first_error(model, error)
        raise InvalidParameterError(parameter, source + message) from None


def first_error(model: type[BaseModel], error: ValidationError) -> tuple[str, str]:
    """The dotted key of a validation error, and one line that says what is wrong and what is allowed."""
    detail = error.errors(include_url=False, include_input=False)[0]
    context = detail.get("ctx", {})
    path, field = _place(model, detail["loc"])
    if detail["type"] == "refused_key":
        key, text = str(context["key"]), detail["msg"]
        return (key, text) if key.startswith(path) else (path, f"{path}: {text}")
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    allowed = "" if field is None else allowed_range(field)
    if allowed:
        message = f"must be {allowed}"
    elif detail["type"] == "string_pattern_mismatch" and field is not None:
        message = f"must be {field.description}"
    elif detail["type"] == "model_type":
        message = "must hold keys and values"
    elif detail["type"] == "tuple_type":
        message = "must be a list"
    elif detail["type"] == "too_long":
        message = f"must have at most {context['max_length']} entries"
    return path, f"{path}: {message}" if path else message


def _place(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """The part of a pydantic location that names keys, and the last one's field; union members' names come after it."""
    path, field = "", None
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int) and field is not None and current is not None:
            path += f"[{part}]"
            field = None
        elif current is not None and part in current.model_fields:
            path += f".{part}" if path else str(part)
            field = current.model_fields[str(part)]
            current = submodel(current, str(part)) or _entries(field)
        else:
            break
    return path, field


def _entries(field: FieldInfo) -> type[StrictModel] | None:
    """The model of each entry of a key that is a list of sections, or None."""
    entry = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else None
    return entry if isinstance(entry, type) and issubclass(entry, StrictModel) else None


def allowed_range(field: FieldInfo) -> str:
    """The range of a numeric key in words, or an empty string where it has none."""
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{words[name]} {getattr(item, name)}" for item in field.metadata for name in words if hasattr(item, name)
    ]
    kind = "a number" if "float" in str(field.annotation) else "a whole number"
    return f"{kind}, {' and '.join(bounds)}" if bounds else ""
