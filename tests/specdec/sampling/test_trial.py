"""Grammars that llguidance would compile for minutes, or for ever, are refused within a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import specdec.demo
from specdec.errors import InvalidParameterError
from specdec.sampling.grammar import Grammar, GrammarKind
from specdec.sampling.grammars import Grammars
from specdec.sampling.trial import takes_too_much

TOKENIZER = AutoTokenizer.from_pretrained(Path(specdec.demo.__file__).parent / "target")
MULTIPLE = {"type": "integer", "multipleOf": 99999989}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"type": "object", "properties": {"a": MULTIPLE}})),
        ("grammar", f"start: %json {json.dumps(MULTIPLE)}"),
        ("grammar", f"start: <think> <[5-4000]> <|other|> %json {json.dumps(MULTIPLE)}"),
        ("grammar", "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(3, 30))),
    ],
)
def test_what_takes_too_long_is_refused(kind: GrammarKind, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.sampling.grammars.takes_too_much", partial(takes_too_much, most_cpu_s=1))
    grammars = Grammars(TOKENIZER, len(TOKENIZER), (0,), tries_first=True)
    with pytest.raises(InvalidParameterError, match="it takes too much time or memory to compile"):
        grammars.check(Grammar(kind, text))
    grammars.check(Grammar("json_schema", '{"type": "integer", "multipleOf": 5}'))


def test_what_is_wrong_is_told_as_ever() -> None:
    grammars = Grammars(TOKENIZER, len(TOKENIZER), (0,), tries_first=True)
    for grammar, reason in ((Grammar("regex", "("), "unclosed group"), (Grammar("choice", "[]"), "none of them empty")):
        with pytest.raises(InvalidParameterError, match=reason):
            grammars.check(grammar)
