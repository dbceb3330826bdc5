"""Parsers of answers tell the same, however the text is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.structured.parsing.calls import (
    AnswerEvent,
    AnswerParser,
    ContentDelta,
    HermesParser,
    Llama3Parser,
    PlainParser,
    ReasoningDelta,
    ResponseTemplateParser,
    ToolCallDelta,
)
from specdec.structured.parsing.reasoning import ReasoningCounter, ReasoningParser, ReasoningTags, WithoutReasoning

Said = tuple[str, str, list[tuple[str, str]]]
"""Content, reasoning, and the name and arguments of each call."""


def said(events: Sequence[AnswerEvent]) -> Said:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ContentDelta():
                content += event.text
            case ReasoningDelta():
                reasoning += event.text
            case ToolCallDelta():
                assert event.index in (len(calls) - 1, len(calls)), "calls come one after the other"
                if event.index == len(calls):
                    assert event.name, "its name comes first"
                    calls.append((event.name, ""))
                else:
                    assert event.name is None
                name, arguments = calls[event.index]
                calls[event.index] = name, arguments + event.arguments
    return content, reasoning, calls


def read(parser: AnswerParser, pieces: Sequence[str]) -> Said:
    return said([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def check_all_cuts(new_parser: Callable[[], AnswerParser], text: str, expected: Said) -> None:
    """Whole, in every two pieces, by characters, and in pieces of every small size."""
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(len(text) + 1))]
    cuts += [[text[i : i + size] for i in range(0, len(text), size)] for size in range(2, 8)]
    for pieces in cuts:
        assert read(new_parser(), pieces) == expected, pieces


A = '{"city": "Rome", "note": "a } \\" </tool_call> ] \\\\"}'
B = '{"of": [1, {"x": {}}]}'
CALL_A = f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>'
CALL_B = f'<tool_call>{{ "name" : "é.b-1","arguments":{B} }}</tool_call>'
HERMES: dict[str, tuple[str, Said]] = {
    "nothing": ("", ("", "", [])),
    "text": ("Hello.\n\n  <b>bold</b> \n", ("Hello.\n\n  <b>bold</b> \n", "", [])),
    "a call": (CALL_A, ("", "", [("weather", A)])),
    "two calls": (f"{CALL_A}\n{CALL_B}\n", ("", "", [("weather", A), ("é.b-1", B)])),
    "calls that touch": (CALL_B + CALL_A, ("", "", [("é.b-1", B), ("weather", A)])),
    "text around": (f"I look.\n{CALL_A}\n\nDone.", ("I look.\n\nDone.", "", [("weather", A)])),
    "no arguments": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', ("", "", [("f", "{}")])),
    "keys the other way": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    "half surrogate pairs": (
        '<tool_call>{"arguments": {"é": "\\ud83d", "🙂": "\\ud83d\\ude42"}, "name": "f\\ud83d"}</tool_call>',
        ("", "", [("f\\ud83d", '{"é": "\\ud83d", "🙂": "🙂"}')]),
    ),
    "only a name": ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    "no JSON": ("a <tool_call>f(1)</tool_call> b", ("a<tool_call>f(1)</tool_call> b", "", [])),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', "", [])),
    "text for arguments": (
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>!',
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>!', "", []),
    ),
    "broken, then whole": (f"<tool_call>no</tool_call>{CALL_B}", ("<tool_call>no</tool_call>", "", [("é.b-1", B)])),
    "no end": (CALL_B.removesuffix("</tool_call>"), ("", "", [("é.b-1", B)])),
    "no end, and another": (CALL_B.removesuffix("</tool_call>") + CALL_B, ("", "", [("é.b-1", B)] * 2)),
    "no brace": (CALL_B.replace(" }</tool_call>", "</tool_call>"), ("", "", [("é.b-1", B)])),
    "half an end": (CALL_B[:-3], ("", "", [("é.b-1", B)])),
    "half its arguments": (CALL_B[:-20], ("", "", [("é.b-1", B[:-6])])),
    "half a head": ('ab <tool_call>{"name": "f', ('ab<tool_call>{"name": "f', "", [])),
    "half a tag": ("a <tool_ca", ("a <tool_ca", "", [])),
    "text in place of an end": (CALL_B.replace("</tool_call>", "so, <b>"), ("so, <b>", "", [("é.b-1", B)])),
    "a key too many": (
        '<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>',
        (', "id": 1}</tool_call>', "", [("f", "{}")]),
    ),
    "blanks alone": (" \n ", (" \n ", "", [])),
}
P = A.replace("</tool_call>", "; {")
ONE = f'{{"name": "weather", "parameters": {P}}}'
TWO = f'{{"name": "g", "parameters": {B}}}'
LLAMA3: dict[str, tuple[str, Said]] = {
    "nothing": ("", ("", "", [])),
    "text": (' Hello; {"a": 1} ', (' Hello; {"a": 1} ', "", [])),
    "a call": (ONE, ("", "", [("weather", P)])),
    "after a tag": (f"<|python_tag|>{ONE}", ("", "", [("weather", P)])),
    "after blanks and a tag": (f"\n <|python_tag|> {ONE}\n", ("", "", [("weather", P)])),
    "three calls": (f"{ONE}; {TWO};{ONE}", ("", "", [("weather", P), ("g", B), ("weather", P)])),
    "an end too many": (f"{ONE};", ("", "", [("weather", P)])),
    "arguments": ('{"name": "f", "arguments": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    "keys the other way": ('{"parameters": {"a": 1}, "name": "f"}', ("", "", [("f", '{"a": 1}')])),
    "other JSON": ('{"a": 1}', ('{"a": 1}', "", [])),
    "code": ("<|python_tag|>print(1)", ("print(1)", "", [])),
    "JSON after a tag": ('<|python_tag|> {"a": 1}', (' {"a": 1}', "", [])),
    "text after a call": (f"{ONE} So.", ("So.", "", [("weather", P)])),
    "text after a semicolon": (f"{ONE}; so", ("; so", "", [("weather", P)])),
    "JSON after a semicolon": (f'{ONE}; {{"a": 1}}', ('; {"a": 1}', "", [("weather", P)])),
    "JSON after a call": (f'{ONE} {{"a": 1}}', ('{"a": 1}', "", [("weather", P)])),
    "half its arguments": (TWO[:-5], ("", "", [("g", B[:-4])])),
    "half a head": (' {"name": "f', (' {"name": "f', "", [])),
    "half a tag": ("<|pyth", ("<|pyth", "", [])),
    "a tag alone": ("<|python_tag|>", ("", "", [])),
}
TAGS = ReasoningTags("<think>", "</think>")
REASONING: dict[str, tuple[bool, str, Said]] = {
    "none": (False, "Hello.", ("Hello.", "", [])),
    "some": (False, "<think>\na <b\n\nc\n</think>\n\nHello.", ("Hello.", "a <b\n\nc", [])),
    "begun": (True, "a\n</think>\n\n  Hello.", ("  Hello.", "a", [])),
    "begun again": (True, "<think>\na</think>Hello.", ("Hello.", "a", [])),
    "empty": (True, "\n</think>\n\nHello.", ("Hello.", "", [])),
    "unfinished": (True, "a </thin", ("", "a </thin", [])),
    "unfinished, at a line's end": (False, "<think>a\n", ("", "a", [])),
    "all of it": (True, "a</think>", ("", "a", [])),
    "later tags are content": (False, "a <think>b</think>", ("a <think>b</think>", "", [])),
    "then a call": (True, f"a</think>\n{CALL_A}", ("", "a", [("weather", A)])),
    "a call in it": (True, f"{CALL_B}\n</think>ok", ("ok", CALL_B, [])),
    "half a tag": (False, "<thi", ("<thi", "", [])),
}


@pytest.mark.parametrize("name", HERMES)
def test_hermes_in_all_cuts(name: str) -> None:
    check_all_cuts(HermesParser, *HERMES[name])


@pytest.mark.parametrize("name", LLAMA3)
def test_llama3_in_all_cuts(name: str) -> None:
    check_all_cuts(Llama3Parser, *LLAMA3[name])


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_in_all_cuts(name: str) -> None:
    has_begun, text, expected = REASONING[name]
    check_all_cuts(lambda: ReasoningParser(TAGS, has_begun, HermesParser()), text, expected)
    content, _, calls = expected
    check_all_cuts(
        lambda: WithoutReasoning(ReasoningParser(TAGS, has_begun, HermesParser())), text, (content, "", calls)
    )


def test_a_plain_text_in_all_cuts() -> None:
    check_all_cuts(PlainParser, CALL_A, (CALL_A, "", []))


@pytest.mark.parametrize(("parser", "text"), [(HermesParser, CALL_A), (Llama3Parser, ONE)], ids=["hermes", "llama3"])
def test_arguments_come_as_they_are_written(parser: type[AnswerParser], text: str) -> None:
    """Nothing of them is held back: each character is told of when it comes."""
    reader, start = parser(), text.index('{"city"')
    for character in text[:start]:
        reader.push(character)
    for character in text[start : start + 20]:  # the first comes with the name
        events = reader.push(character)
        assert said([ToolCallDelta(0, "f", ""), *(replace(e, name=None) for e in events)])[2] == [("f", character)]


TEMPLATE = {
    "start_anchor": "assistant:",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
BY_TEMPLATE: dict[str, tuple[str, Said]] = {
    "text": ("Hello <b>.", ("Hello <b>.", "", [])),
    "all": (
        '<think>hm, <c</think>ok<call>{"name": "f", "arguments": {"a": "é"}}</call>'
        '<call>{"name":"g","arguments":{}}</call>',
        ("ok", "hm, <c", [("f", '{"a": "é"}'), ("g", "{}")]),
    ),
    "half surrogate pairs": (
        '<call>{"name": "f\\ud83d", "arguments": {"a": "\\ud83d"}}</call>'
        '<call>{"name": "g", "arguments": "\\ud83d"}</call>',
        ("", "", [("f\\ud83d", '{"a": "\\ud83d"}'), ("g", "\\ud83d")]),
    ),
    "broken": ('a<call>{"name": </call>b', ('a<call>{"name": </call>b', "", [])),
    "no call": ("a<call>[1]</call>b", ("a<call>[1]</call>b", "", [])),
    "unfinished": ('a<call>{"name": "f"', ('a<call>{"name": "f"', "", [])),
}


@pytest.mark.parametrize("name", BY_TEMPLATE)
def test_a_response_template_in_all_cuts(demo_tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    tokenizer = deepcopy(demo_tokenizer)
    tokenizer.response_template = TEMPLATE
    check_all_cuts(lambda: ResponseTemplateParser(tokenizer, "user: x assistant:", []), *BY_TEMPLATE[name])
    begun = lambda: ResponseTemplateParser(tokenizer, "user: x assistant:<think>", [])  # noqa: E731
    check_all_cuts(begun, "a</think>b", ("b", "a", []))


@pytest.mark.parametrize(
    ("has_begun", "tokens", "expected"),
    [
        (True, ["a", " b", "</think>", "c", "d"], 2),
        (True, ["a", " b", "</th", "ink", ">", "c"], 2),
        (True, ["a", " b</", "think", ">c", "</think>"], 2),
        (True, ["a", "<", "b", "</thin"], 4),
        (True, ["</think>", "c"], 0),
        (False, ["<think>", "\n", "a", "</think>", "c"], 2),
        (False, ["\n", "<th", "ink>a", "b", "</think>", "c"], 2),
        (False, ["a", "<think>", "b"], 0),
        (False, [], 0),
    ],
)
def test_tokens_of_reasoning_are_counted(has_begun: bool, tokens: list[str], expected: int) -> None:
    texts = dict(enumerate(text.encode() for text in tokens))
    for size in (1, 2, 10):
        counter = ReasoningCounter(TAGS, has_begun, texts.__getitem__)
        for start in range(0, len(tokens), size):
            counter.push(range(start, min(start + size, len(tokens))))
        assert counter.num_tokens == expected
