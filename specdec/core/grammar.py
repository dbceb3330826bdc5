"""What a text must match, as a request says it: plain data, which travels with its sequence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher, StructTag, grammar_from

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "llguidance"]
MAX_GRAMMAR_BYTES = 1 << 16
"""Longest text of a grammar: it travels with its sequence, and whoever holds one compiles it."""
_MOST_COMPOSED_BYTES = 2 * MAX_GRAMMAR_BYTES

_HEADER = "%llguidance"
_WITHOUT_END = f'{_HEADER} {{"no_forcing": true}}\n'
"""Before a grammar whose rules may force bytes without end, which llguidance would look for in every step."""
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line: no model can go on with blanks without end."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an output must match from its first token on.

    Attributes:
        kind: What ``text`` is: ``json_schema``, a JSON schema; ``json_object``, nothing: any JSON object; ``regex``, a
            regular expression in the syntax of Rust's ``regex``; ``choice``, a JSON list of strings; ``grammar``, a
            grammar in Lark's or llama.cpp's (GBNF) syntax; ``structural_tag``, a JSON object with ``structures``
            (each with ``begin``, ``schema`` and ``end``) and ``triggers``: free text, in which whatever begins like a
            trigger must be one of the structures; ``llguidance``, llguidance's own form, which is what grammars of tool
            calls and reasoning are composed in (:mod:`specdec.structured.constraints`).
    """

    kind: GrammarKind
    text: str = ""


def llguidance_grammar(grammar: Grammar, special_tokens: frozenset[str] = frozenset()) -> str:
    """A grammar in llguidance's own form; most mistakes in it are found only when that is compiled.

    Args:
        grammar: As a request says it.
        special_tokens: Texts that are single tokens and cannot be written otherwise.

    Raises:
        ValueError: It is too long, or not of the form that its kind asks for.
    """
    check_length(grammar)
    match grammar.kind:
        case "llguidance":
            return grammar.text
        case "json_schema":
            return _json(grammar.text)
        case "json_object":
            return _json('{"type": "object"}')
        case "choice":
            return _choice(json.loads(grammar.text))
        case "structural_tag":
            return _structural_tag(json.loads(grammar.text), special_tokens)
        case "grammar":
            return _rules(grammar.text)
    return grammar_from(grammar.kind, grammar.text)


def check_length(grammar: Grammar) -> None:
    """Refuse a grammar whose text is too long to be kept, or to travel.

    Raises:
        ValueError: It is; or it has no UTF-8 form.
    """
    num_bytes = len(grammar.text.encode())
    most = _MOST_COMPOSED_BYTES if grammar.kind == "llguidance" else MAX_GRAMMAR_BYTES
    if num_bytes > most:
        raise ValueError(f"it has {num_bytes} bytes, at most {most} are taken")


def _json(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)


def _rules(text: str) -> str:
    if _HEADER in text:
        raise ValueError(f"it has options of its own, {_HEADER}")
    return _WITHOUT_END + grammar_from("grammar", text).removeprefix(f"{_HEADER} {{}}\n")


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise ValueError("choices must be a list of strings, none of them empty")
    return grammar_from("choice", json.dumps(choices))


def _structural_tag(tag: Any, special_tokens: frozenset[str]) -> str:
    try:
        triggers = [str(trigger) for trigger in tag["triggers"]]
        structures = [(str(one["begin"]), one.get("schema", {}), str(one["end"])) for one in tag["structures"]]
    except (AttributeError, KeyError, TypeError):
        raise ValueError("a structural tag has 'structures' with 'begin', 'schema' and 'end', and 'triggers'") from None
    tags = []
    for begin, schema, end in structures:
        trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"{begin!r} begins with none of the triggers")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=on_one_line(schema), end=end))
    if not tags:
        raise ValueError("a structural tag has at least one structure")
    return StructTag.to_grammar(tags, assume_special=all(tag.trigger in special_tokens for tag in tags))


def on_one_line(schema: Any) -> dict[str, Any]:
    """A schema within another grammar, whose JSON is written as everywhere here.

    Raises:
        ValueError: It is no object.
    """
    if not isinstance(schema, Mapping) or not isinstance(schema.get("x-guidance", {}), Mapping):
        raise ValueError("the schema of a structure is an object, and so is its 'x-guidance'")
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **_JSON}}
