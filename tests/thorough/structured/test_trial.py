"""Grammars that llguidance would compile for minutes, or for ever, are refused within a time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import specdec.demo
from specdec.core.errors import InvalidParameterError
from specdec.core.grammar import Grammar, GrammarKind
from specdec.structured.compiler import Grammars
from specdec.structured.trial import takes_too_much

TOKENIZER = AutoTokenizer.from_pretrained(Path(specdec.demo.__file__).parent / "target")
ROOT = Path(__file__).resolve().parents[3]
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
    monkeypatch.setattr("specdec.structured.compiler.takes_too_much", partial(takes_too_much, most_cpu_s=1))
    grammars = Grammars(TOKENIZER, len(TOKENIZER), (0,), tries_first=True)
    with pytest.raises(InvalidParameterError, match="it takes too much time or memory to compile"):
        grammars.check(Grammar(kind, text))
    grammars.check(Grammar("json_schema", '{"type": "integer", "multipleOf": 5}'))


CHAIN = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(4500)), 'a4500: "x"'])
LINKS = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)} | {"d1200": {}}
LARGE = {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 99991 + 2 * i} for i in range(3)]}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", CHAIN),
        ("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": LINKS})),
        ("json_schema", json.dumps(LARGE)),
    ],
    ids=["deep rules", "deep schema", "large"],
)
def test_what_takes_too_much_stack_or_memory_is_refused(kind: GrammarKind, text: str) -> None:
    grammars = Grammars(TOKENIZER, len(TOKENIZER), (0,), tries_first=True)
    with pytest.raises(InvalidParameterError, match="it takes too much time or memory to compile"):
        grammars.check(Grammar(kind, text))


ENDLESS = [
    ('start: a start "b"\na: /x+/', ""),
    ('start: "q" s | "z"\ns: a s "b"\na: /x+/', "q"),
]
ASK = """
import json, sys, torch
from pathlib import Path
from transformers import AutoTokenizer
import specdec.demo
from specdec.core.grammar import Grammar
from specdec.structured.compiler import Grammars
from specdec.structured.matchers import Matchers
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.sampling.rows import RowGroup
from specdec.structured.constraints import Tags, after_reasoning
from specdec.structured.parsing.reasoning import ReasoningTags

text, begin, thinks = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(Path(specdec.demo.__file__).parent / "target")
grammar = Grammar("grammar", text)
if thinks:
    begin = "<t>a</t>" + begin
    grammar = after_reasoning(ReasoningTags("<t>", "</t>"), False, None, Tags({}), grammar)
grammars = Grammars(tokenizer, len(tokenizer), (0,), tries_first=True)
grammars.check(grammar)
tokens = tokenizer.encode(begin + "x" * 40, add_special_tokens=False)
spec = SequenceSpec(SamplingParams(grammar=grammar), 1, 0, 500, (0,))
matchers = Matchers(grammars)
for length in range(len(tokens) + 1):
    assert matchers.forced(spec, tokens[:length], 8) == ()
    (masked,), failures = matchers.masked([RowGroup(spec, tokens[:length])])
    assert not failures
print("asked")
"""


@pytest.mark.parametrize("thinks", [False, True], ids=["alone", "after reasoning"])
@pytest.mark.parametrize(("text", "begin"), ENDLESS)
def test_rules_that_force_bytes_without_end_hold_nobody_up(text: str, begin: str, thinks: bool) -> None:
    """In a process of its own: what hangs there holds the interpreter."""
    command = [sys.executable, "-c", ASK, json.dumps([text, begin, thinks])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ended.stdout.strip() == "asked", ended.stderr


def test_options_of_llguidance_in_a_grammar_are_refused() -> None:
    grammars = Grammars(TOKENIZER, len(TOKENIZER), (0,), tries_first=True)
    with pytest.raises(InvalidParameterError, match="options of its own"):
        grammars.check(Grammar("grammar", '%llguidance {"no_forcing": false}\nstart: "a"'))


def test_what_nobody_waits_for_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, begun = threading.Event(), []

    def slow(text: str) -> bool:
        begun.append(text)
        return not may_end.wait(60)

    monkeypatch.setattr("specdec.structured.compiler.takes_too_much", slow)
    grammars = Grammars(TOKENIZER, len(TOKENIZER), (0,), tries_first=True)
    running = [grammars.compiled(Grammar("regex", text), (0,)) for text in ("a", "b")]
    with grammars.awaited(Grammar("regex", "wanted"), (0,)) as wanted:
        with grammars.awaited(Grammar("regex", "given up"), (0,)) as given_up:
            pass
        with grammars.awaited(Grammar("regex", "wanted"), (0,)):
            pass
        may_end.set()
        wanted.result(60)
    assert given_up.cancelled()
    assert all(one.result(60) for one in running)
    assert len(begun) == 3
    with grammars.awaited(Grammar("regex", "given up"), (0,)) as again:
        assert again.result(60)


def test_a_trial_that_something_else_has_ended_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills a process of whose memory it has need."""
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))

    def ended_by(line: str) -> bool:
        python.write_text(f"#!/bin/sh\n{line}\n")
        python.chmod(0o700)
        return takes_too_much("")

    assert ended_by("kill -SEGV $$")
    for line in ("kill -KILL $$", "exit 1"):
        with pytest.raises(OSError, match="the process that tries it ended"):
            ended_by(line)


def test_what_is_wrong_is_told_as_ever() -> None:
    grammars = Grammars(TOKENIZER, len(TOKENIZER), (0,), tries_first=True)
    for grammar, reason in ((Grammar("regex", "("), "unclosed group"), (Grammar("choice", "[]"), "none of them empty")):
        with pytest.raises(InvalidParameterError, match=reason):
            grammars.check(grammar)
