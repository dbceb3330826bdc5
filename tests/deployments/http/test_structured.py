"""Fields that ask for structured output: what becomes of them, and what is refused, by its name."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

import httpx2
import pytest

from specdec.core.grammar import Grammar
from specdec.structured.compiler import Grammars

from .bodies import MESSAGES, SCHEMA
from .conftest import Bench

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
OF_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
SERVED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, OF_SCHEMA),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": False}}},
        Grammar("json_schema", "{}"),
    ),
    ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG))),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "whitespace_pattern": None}}, OF_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": False}}, OF_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("grammar", 'start: "a"')),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        Grammar("structural_tag", json.dumps(TAG)),
    ),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
    ({"guided_json_object": True, "guided_regex": "", "guided_choice": []}, Grammar("json_object")),
    ({"guided_regex": "[0-9]"}, Grammar("regex", "[0-9]")),
    ({"guided_choice": ["yes", "no"]}, Grammar("choice", '["yes", "no"]')),
    ({"guided_grammar": 'root ::= "a"', "guided_decoding_backend": "xgrammar"}, Grammar("grammar", 'root ::= "a"')),
    ({"guided_json_object": False, "guided_grammar": "", "structured_outputs": {}}, None),
]


@pytest.mark.parametrize(("fields", "grammar"), SERVED)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_the_sequence_has_the_grammar(
    bench: Bench, http: httpx2.AsyncClient, path: str, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    bench.says("{}")
    body = {"model": "demo", "n": 2} | ({"prompt": "a"} if path == "completions" else {"messages": MESSAGES})
    answer = await http.post(f"/v1/{path}", json=body | fields)
    assert answer.status_code == 200, answer.text
    assert [request.spec.sampling.grammar for request in bench.service.opened] == [grammar] * 2


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json_object"}, "response_format", "dictionary"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"typ": "text"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", '"schema"'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}}},
        "response_format.json_schema.strikt",
        "unknown field",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict",
        "true or false",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}},
        "response_format.json_schema.schema",
        "Invalid type: objec",
    ),
    ({"response_format": TAG | {"triggers": ["<g>"]}}, "response_format", "none of the triggers"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "'triggers'"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "exclude each other"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "exclude each other"),
    ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs.jsn", "unknown field"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "disable_any_whitespace", "supported"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "a string"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "list of strings"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice", "list of strings"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_grammar": "start: foo"}, "guided_grammar", 'unknown name: "foo"'),
    ({"guided_grammar": "x"}, "guided_grammar", "cannot be used"),
    ({"guided_json": "{"}, "guided_json", "EOF"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"type": "integer", "multipleOf": 99999989}}, "guided_json", "too much time"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "json_schema", "an object"),
    ({"structured_outputs": {"json": True}}, "structured_outputs.json", "object"),
    ({"guided_choice": [""]}, "guided_choice", "none of them empty"),
    ({"guided_choice": ["a" * 70_000]}, "guided_choice", "at most 65536"),
    ({"regex": "a+"}, "regex", "the field to send is guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
async def test_what_is_wrong_is_refused_by_its_name(
    bench: Bench, http: httpx2.AsyncClient, fields: dict[str, Any], param: str, reason: str
) -> None:
    answer = await http.post("/v1/completions", json={"model": "demo", "prompt": "a"} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].endswith(param)
    assert error["param"] in error["message"]
    assert reason in error["message"]
    assert len(error["message"]) < 700
    assert not bench.service.opened


async def test_grammars_are_compiled_once_and_beside_the_event_loop(
    bench: Bench, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that goes away takes nothing from others that wait for the same."""
    bench.says("{}")
    begun, may_end, work = asyncio.Event(), asyncio.Event(), Grammars._compile
    loop, compiled = asyncio.get_running_loop(), []

    def slow(grammars: Grammars, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> Any:
        compiled.append(grammar)
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(20)
        return work(grammars, grammar, eos_token_ids)

    monkeypatch.setattr(Grammars, "_compile", slow)
    body = {"model": "demo", "prompt": "a", "guided_regex": "a+"}
    first, second = (asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2))
    await begun.wait()
    assert (await http.post("/v1/completions", json={"model": "demo", "prompt": "a"})).status_code == 200
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    may_end.set()
    assert (await second).status_code == 200
    assert compiled == [Grammar("regex", "a+")]


async def test_a_grammar_that_waits_its_turn_for_too_long_is_given_up(
    bench: Bench, http: httpx2.AsyncClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is that of a client that goes away."""
    may_end, loop, compiled, work = asyncio.Event(), asyncio.get_running_loop(), [], Grammars._compile

    def slow(grammars: Grammars, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> Any:
        compiled.append(grammar.text)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(20)
        return work(grammars, grammar, eos_token_ids)

    monkeypatch.setattr(Grammars, "_compile", slow)
    bench.says("{}")
    body = {"model": "demo", "prompt": "a"}
    running = [asyncio.create_task(http.post("/v1/completions", json=body | {"guided_regex": one})) for one in "bcd"]
    while len(compiled) < 3:
        await asyncio.sleep(0.01)
    asked = body | {"guided_regex": "late"}
    late = await http.post("/v1/completions", json=asked, headers={"x-request-timeout-seconds": "0.1"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
    async with httpx2.AsyncClient(timeout=0.2) as leaving:
        with pytest.raises(httpx2.TimeoutException):
            await leaving.post(f"{url}/v1/completions", json=body | {"guided_regex": "left"})
    while bench.app.state.api.grammars._awaited.keys() - {(Grammar("regex", one), (0,)) for one in "bcd"}:
        await asyncio.sleep(0.01)
    may_end.set()
    assert [(await one).status_code for one in running] == [200, 200, 200]
    assert compiled == ["b", "c", "d"]


async def test_a_grammar_that_is_too_long_is_not_kept(bench: Bench, http: httpx2.AsyncClient) -> None:
    for letter in "abcde":
        body = {"model": "demo", "prompt": "a", "guided_regex": letter * 1_000_000}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "it has 1000000 bytes, at most 65536 are taken" in answer.text
    grammars = bench.app.state.api.grammars
    assert not grammars._compiled
    assert not grammars._awaited


async def test_a_grammar_that_could_not_be_tried_is_tried_again(
    bench: Bench, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = [OSError(errno.EMFILE, "Too many open files")]

    def short_of_files(_text: str) -> bool:
        if passing:
            raise passing.pop()
        return False

    monkeypatch.setattr("specdec.structured.compiler.takes_too_much", short_of_files)
    bench.says("aa")
    body = {"model": "demo", "prompt": "a", "guided_regex": "a+"}
    first, second = [await http.post("/v1/completions", json=body) for _ in range(2)]
    assert (first.status_code, second.status_code) == (503, 200)
    assert first.json()["error"]["message"].startswith("the grammar cannot be tried now: OSError: [Errno 24] Too many")
    assert first.headers["retry-after"]
