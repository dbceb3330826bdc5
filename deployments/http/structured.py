"""From the fields that ask for structured output to a grammar, by each of their names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from deployments.http.context import Api
from deployments.http.schemas.common import GenerationBody
from specdec.core.errors import InvalidParameterError, UnsupportedParameterError
from specdec.core.grammar import Grammar, GrammarKind
from specdec.core.types import Tokens

_OF_JSON_SCHEMA = frozenset({"name", "description", "schema", "strict"})
_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's names."""
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""What else vLLM's ``structured_outputs`` may say: here there is one way to write JSON."""


class AskedGrammar(NamedTuple):
    """A grammar, and the field that asks for it."""

    param: str
    grammar: Grammar


def asked_grammar(body: GenerationBody) -> AskedGrammar | None:
    """What the output must match; None where it may be anything.

    Raises:
        InvalidParameterError: A field is not as it should be, or two ask for something.
        UnsupportedParameterError: It asks for what is not to be had.
    """
    asked = [*_response_format(body.response_format or {}), *_structured_outputs(body.structured_outputs or {})]
    for kind in ("json", "json_object", "regex", "choice", "grammar"):
        name = f"guided_{kind}"
        grammar = _grammar(name, kind, getattr(body, name))
        if grammar is not None:
            asked.append(AskedGrammar(name, grammar))
    if len(asked) > 1:
        raise InvalidParameterError(asked[1].param, f"{asked[0].param} and {asked[1].param} exclude each other")
    return asked[0] if asked else None


async def checked_grammar(api: Api, body: GenerationBody) -> Grammar | None:
    """What the output must match, compiled, beside the event loop, so that the request is refused where it cannot be.

    Raises:
        InvalidParameterError: As :func:`asked_grammar` says, or it cannot be compiled; it names the field.
    """
    asked = asked_grammar(body)
    if asked is None:
        return None
    await check_compiled(api, asked, api.model(body.model).eos_token_ids)
    return asked.grammar


async def check_compiled(api: Api, asked: AskedGrammar, eos_token_ids: Tokens) -> None:
    """Compile a grammar beside the event loop, for a model whose texts end with these tokens.

    Raises:
        InvalidParameterError: It cannot be compiled; it names the field.
        ServiceUnavailableError: It cannot be tried now.
    """
    with api.grammars.awaited(asked.grammar, eos_token_ids, api.caller) as compiled:
        try:
            await asyncio.shield(asyncio.wrap_future(compiled))  # others may wait for the same
        except InvalidParameterError as error:
            raise InvalidParameterError(asked.param, f"{asked.param}: {error}") from error


def _response_format(asked: dict[str, Any]) -> Iterator[AskedGrammar]:
    param = "response_format"
    match asked.get("type") if asked else "text":
        case "text":
            return
        case "json_object":
            yield AskedGrammar(param, Grammar("json_object"))
        case "json_schema":
            inner = asked.get("json_schema")
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
                raise InvalidParameterError(
                    f"{param}.json_schema", f'{param}.json_schema must be an object with a "schema", an object'
                )
            unknown = next((name for name in inner if name not in _OF_JSON_SCHEMA), None)
            if unknown is not None:
                name = f"{param}.json_schema.{unknown[:64]}"
                raise InvalidParameterError(name, f"unknown field {name!r}", "unknown_parameter")
            if not isinstance(inner.get("strict"), bool | None):
                raise InvalidParameterError(
                    f"{param}.json_schema.strict", f"{param}.json_schema.strict must be true or false"
                )
            yield AskedGrammar(f"{param}.json_schema.schema", Grammar("json_schema", json.dumps(inner["schema"])))
        case "structural_tag":
            yield AskedGrammar(param, Grammar("structural_tag", json.dumps(asked)))
        case _:
            kinds = "text, json_object, json_schema or structural_tag"
            raise InvalidParameterError(f"{param}.type", f"{param}.type must be one of {kinds}")


def _structured_outputs(asked: dict[str, Any]) -> Iterator[AskedGrammar]:
    for name, value in asked.items():
        param = f"structured_outputs.{name[:64]}"
        if name in _KINDS:
            grammar = _grammar(param, name, value)
            if grammar is not None:
                yield AskedGrammar(param, grammar)
        elif name in _OPTIONS:
            if value is not None and value is not False:
                raise UnsupportedParameterError(param, f"{param} is not supported", "unsupported_parameter")
        elif name != "disable_fallback":
            raise InvalidParameterError(param, f"unknown field {param!r}", "unknown_parameter")


def _grammar(param: str, kind: str, value: Any) -> Grammar | None:
    """A grammar of one of vLLM's kinds; None for what asks for nothing."""
    if value is None or (not value and kind not in ("json", "structural_tag")):
        return None
    if kind == "json_object":
        if value is not True:
            raise InvalidParameterError(param, f"{param} must be true or false")
        return Grammar("json_object")
    if kind in ("regex", "grammar") and not isinstance(value, str):
        raise InvalidParameterError(param, f"{param} must be a string")
    return Grammar(_KINDS[kind], value if isinstance(value, str) and kind != "choice" else json.dumps(value))
