"""Tools: what the prompt says of them, what the answer must match, and how calls come back."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import httpx2
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from deployments.http.service import ApiSettings
from tests.deployments.http.scripted import rounds

from .bodies import SCHEMA
from .conftest import Bench, accepts

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "What weather?"}]
BODY: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": [WEATHER, CLOCK, NOW]}
A, B = '{"city": "Rome", "days": 3}', "{}"
CALL_A = f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>'
CALL_B = f'<tool_call>\n{{"name": "now", "arguments": {B}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


HERMES_LIKE = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools: <tool_call> #}"
LLAMA_LIKE = '{% for m in messages %}{{ m.content }}{% endfor %}{# tools: {"name": ..., "parameters": dictionary} #}'
NO_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}"
OTHER_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools: <tool_call>f<arg_key> #}"


@pytest.fixture
def bench(tokenizer: PreTrainedTokenizerFast) -> Bench:
    return Bench(tokenizer, max_model_len=1024)


def prompt_of(bench: Bench) -> str:
    return str(bench.tokenizer.decode(list(bench.service.opened[-1].prompt)))


async def post(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def streamed(http: httpx2.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post("/v1/chat/completions", json=BODY | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    for call in message["tool_calls"]:
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


async def test_the_prompt_tells_of_tools_unless_none_may_be_called(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says(CALL_A)
    await post(http)
    assert prompt_of(bench) == (
        "<|endoftext|># Tools:\n"
        f'# {{"name": "weather", "description": "Of a city.", "parameters": {json.dumps(CITY)}}}\n'
        f'# {{"name": "clock", "parameters": {json.dumps(SCHEMA)}}}\n'
        '# {"name": "now", "parameters": {"type": "object", "properties": {}}}\n'
        '# <tool_call>\n# {"name": ..., "arguments": {...}}\n# </tool_call>\n'
        "# What weather?\n"
    )
    answer = await post(http, tool_choice="none")
    assert prompt_of(bench) == "<|endoftext|># What weather?\n"
    assert answer["choices"][0]["message"]["content"] == CALL_A
    assert bench.service.opened[-1].spec.sampling.grammar is None


async def test_the_prompt_tells_of_tools_that_are_not_allowed(bench: Bench, http: httpx2.AsyncClient) -> None:
    """So the prefix of a conversation stays the same while what may be called changes."""
    bench.says(CALL_A)
    await post(http)
    prompt = prompt_of(bench)
    for choice in (allowed("auto", "now"), allowed("required", "weather"), allowed("auto")):
        answer = await post(http, **choice)
        assert prompt_of(bench) == prompt
    assert answer["choices"][0]["message"]["content"] == CALL_A
    assert bench.service.opened[-1].spec.sampling.grammar is None


async def test_the_prompt_tells_of_calls_and_results(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("ok")
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": ""}},
    ]
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Sun.\n20 degrees."},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "Noon."}]},
    ]
    body = {"messages": turns, "tools": [NOW]}
    await post(http, **body)
    assert prompt_of(bench).partition("# What weather?\n")[2] == (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        "# <tool_response>\n# Sun.\n# 20 degrees.\n# </tool_response>\n"
        "# <tool_response>\n# Noon.\n# </tool_response>\n"
    )
    tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == list(bench.service.opened[-1].prompt)
    names = "{% for m in messages %}{{ m.name or '-' }}{% endfor %}<tool_call>"
    await post(http, messages=turns, chat_template=names)
    assert prompt_of(bench) == "--weathernow<tool_call>"


ANSWERS: list[tuple[dict[str, Any], str, str | None, list[tuple[str, str]], str]] = [
    ({}, CALL_A, None, [("weather", A)], "tool_calls"),
    ({}, f"I look.\n{CALL_A}\n{CALL_B}", "I look.", [("weather", A), ("now", B)], "tool_calls"),
    ({}, "No tools.\n", "No tools.\n", [], "stop"),
    ({"tool_choice": "auto"}, "a <tool_call>f()</tool_call>", "a<tool_call>f()</tool_call>", [], "stop"),
    ({"tool_choice": "required"}, f"{CALL_A}\n{CALL_B}", None, [("weather", A), ("now", B)], "tool_calls"),
    ({"tool_choice": NAMED}, CALL_A, None, [("weather", A)], "stop"),
    ({"chat_template": LLAMA_LIKE}, CALL_A, CALL_A, [], "stop"),
    (
        {"chat_template": LLAMA_LIKE},
        f'{{"name": "weather", "parameters": {A}}}; {{"name": "now", "parameters": {B}}}',
        None,
        [("weather", A), ("now", B)],
        "tool_calls",
    ),
    ({"chat_template": NO_TOOLS, "tool_choice": "required"}, CALL_B, None, [("now", B)], "tool_calls"),
]


@pytest.mark.parametrize(("fields", "text", "content", "calls", "finish"), ANSWERS)
async def test_an_answer_with_calls(
    bench: Bench,
    http: httpx2.AsyncClient,
    fields: dict[str, Any],
    text: str,
    content: str | None,
    calls: list[tuple[str, str]],
    finish: str,
) -> None:
    """Whole and in a stream, each of several choices."""
    bench.says(text, 3)
    for choice in (await post(http, **fields, n=2))["choices"]:
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == (content, finish)
        assert ("tool_calls" in message) == bool(calls)
        assert not calls or calls_of(message) == calls
    deltas = await streamed(http, **fields, n=2)
    for index in range(2):
        own = [choice for choice in deltas if choice["index"] == index]
        assert "".join(choice["delta"].get("content") or "" for choice in own) == (content or "")
        assert own[-1]["finish_reason"] == finish
        told: dict[int, list[Any]] = {}
        for choice in own:
            for call in choice["delta"].get("tool_calls", []):
                if call["index"] not in told:
                    assert call["index"] == len(told)
                    assert (call["type"], call["id"][:5]) == ("function", "call_")
                    told[call["index"]] = [call["function"]["name"], ""]
                else:
                    assert not {"id", "type"} & set(call)
                    assert "name" not in call["function"]
                told[call["index"]][1] += call["function"]["arguments"]
        assert [tuple(one) for one in told.values()] == calls


async def test_arguments_are_streamed_in_pieces(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says(CALL_A)
    deltas = [call for choice in await streamed(http) for call in choice["delta"].get("tool_calls", [])]
    assert len(deltas) >= 6
    assert "".join(call["function"]["arguments"] for call in deltas) == A


async def test_an_answer_that_is_cut_off_has_half_a_call(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says(CALL_A[:60], finish="length")
    (choice,) = (await post(http))["choices"]
    assert choice["finish_reason"] == "length"
    ((name, arguments),) = calls_of(choice["message"])
    assert name == "weather"
    assert A.startswith(arguments)


WRONG_A = CALL_A.replace('"Rome"', '"Bonn"')
CALL_CLOCK = CALL_A.replace("weather", "clock").replace(A, '{"a": 1}')
MASKS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"tool_choice": "required"},
        [CALL_A, f"{CALL_A}\n{CALL_B}\n{CALL_A}", CALL_CLOCK],
        ["", "text", f"a{CALL_A}", WRONG_A, CALL_A.replace("weather", "other"), f"{CALL_A}.", CALL_A[:-3]],
    ),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL_A, CALL_B], [f"{CALL_A}\n{CALL_B}"]),
    ({"tool_choice": NAMED}, [CALL_A], [CALL_B, f"{CALL_A}\n{CALL_A}", WRONG_A]),
    (
        {},
        ["", "text <b>", CALL_A, WRONG_A, f"a {CALL_A} b {CALL_CLOCK}"],
        ["<tool_call>f", CALL_A.replace("weather", "other"), CALL_CLOCK.replace("1", '"1"')],
    ),
    (
        {"response_format": {"type": "json_object"}},
        ['{"x": 1}', CALL_A, f"{CALL_A}\n{CALL_B}"],
        ["text", f"x{CALL_A}", CALL_A.replace("weather", "other")],
    ),
    ({"tool_choice": "none", "response_format": {"type": "json_object"}}, ["{}"], [CALL_A]),
    (allowed("required", "weather", "clock"), [CALL_A, f"{CALL_CLOCK}\n{CALL_A}"], ["", "text", CALL_B, WRONG_A]),
    (allowed("auto", "weather"), ["", "text", CALL_A, WRONG_A, f"{CALL_A}\n{CALL_A}"], [CALL_B, CALL_CLOCK]),
    (
        {"chat_template": LLAMA_LIKE} | allowed("auto", "now"),
        ["text", '{"name": "now", "parameters": {}}'],
        [f'{{"name": "weather", "parameters": {A}}}'],
    ),
    (
        {"chat_template": LLAMA_LIKE},
        ["", "text {", f'{{"name": "weather", "parameters": {A}}}'],
        ['{"a": 1}', '{"name": "other", "parameters": {}}'],
    ),
    (
        {"chat_template": LLAMA_LIKE, "tool_choice": "required"},
        ['{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'],
        ["text", CALL_A, '{"name": "now", "parameters": {"a": 1}}'],
    ),
    ({"chat_template": NO_TOOLS, "tool_choice": "required"}, [CALL_A], ["text"]),
]


@pytest.mark.parametrize(("fields", "allowed", "forbidden"), MASKS)
async def test_what_an_answer_must_match(
    bench: Bench, http: httpx2.AsyncClient, fields: dict[str, Any], allowed: list[str], forbidden: list[str]
) -> None:
    bench.says("ok")
    await post(http, **fields)
    for text in allowed:
        assert accepts(bench, text), text
    for text in forbidden:
        assert not accepts(bench, text), text


UNKNOWN_SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
UNKNOWN = {"type": "function", "function": {"name": "u", "parameters": UNKNOWN_SCHEMA}}
LIST: dict[str, Any] = {"type": "function", "function": {"name": "list", "parameters": []}}
ODD: dict[str, Any] = {"type": "function", "function": {"name": "odd", "parameters": {"x-guidance": 1}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [NOW] * 2}, "tools", "'now'"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "128"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
    ({"tools": [LIST]}, "tools[0].function.parameters", ""),
    ({"tools": []} | {"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": None} | {"tool_choice": NAMED}, "tool_choice", "needs tools"),
    ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice", "'weather'"),
    ({"tools": None} | allowed("auto"), "tool_choice", "needs tools"),
    ({"tools": [NOW]} | allowed("auto", "now", "weather"), "tool_choice", "'weather'"),
    (allowed("required"), "tool_choice", "allows none"),
    (allowed("none", "now"), "tool_choice.allowed_tools.mode", "'auto'"),
    (allowed("auto", *["now"] * 129), "tool_choice.allowed_tools.tools", "128"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "required"),
    ({"tool_choice": "any"}, "tool_choice", "required"),
    ({"tool_choice": 1}, "tool_choice", "required"),
    ({"tools": [NOW, UNKNOWN], "tool_choice": "required"}, "tools[1].function.parameters", "uniqueItems"),
    ({"tools": [NOW, ODD], "tool_choice": "required"}, "tools", "'x-guidance'"),
    ({"chat_template": NO_TOOLS}, "tools", "has no tools"),
    ({"chat_template": OTHER_TOOLS}, "tools", "not known"),
    ({"chat_template": LLAMA_LIKE, "response_format": {"type": "json_object"}}, "response_format", "other JSON"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "triggers"),
    ({"guided_regex": "("}, "guided_regex", "unclosed"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
async def test_what_cannot_be_had_is_refused_by_name(
    bench: Bench, http: httpx2.AsyncClient, fields: dict[str, Any], param: str, reason: str
) -> None:
    answer = await http.post("/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert reason in error["message"]
    assert not bench.service.opened


async def test_a_schema_that_cannot_be_compiled_is_no_matter_where_it_is_not_kept_to(
    bench: Bench, http: httpx2.AsyncClient
) -> None:
    bench.says("ok")
    await post(http, tools=[UNKNOWN])


@pytest.mark.parametrize("is_special", [False, True])
async def test_tags_that_are_tokens(tokenizer: PreTrainedTokenizerFast, is_special: bool) -> None:
    """They reach the parser, whether they are left out of texts or not; in the grammar they are nothing else."""
    own = deepcopy(tokenizer)
    names = ("<tool_call>", "</tool_call>", "<|python_tag|>")
    own.add_tokens([AddedToken(name, special=is_special) for name in names], special_tokens=is_special)
    bench = Bench(own, max_model_len=1024)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        ids = [*own.encode(f"Yes.{CALL_A}"), 0]
        assert set(own.convert_tokens_to_ids(names[:2])) < set(ids)
        bench.script = lambda request: rounds(ids, 2)
        (choice,) = (await post(http))["choices"]
        assert (choice["message"]["content"], calls_of(choice["message"])) == ("Yes.", [("weather", A)])
        assert accepts(bench, f"Yes.{CALL_A}\n{CALL_B} so")
        assert not accepts(bench, "<tool_call>f")
        (choice,) = (await post(http, tool_choice="none"))["choices"]
        shown = f"Yes.{CALL_A}"
        assert choice["message"]["content"] == (
            shown.replace(names[0], "").replace(names[1], "") if is_special else shown
        )
        await post(http, tool_choice="required")
        assert accepts(bench, CALL_A)
        assert not accepts(bench, WRONG_A)
        ids = [*own.encode(f'<|python_tag|>{{"name": "weather", "parameters": {A}}}'), 0]
        bench.script = lambda request: rounds(ids, 2)
        (choice,) = (await post(http, chat_template=LLAMA_LIKE))["choices"]
        assert (choice["message"]["content"], calls_of(choice["message"])) == (None, [("weather", A)])
        assert accepts(bench, f'<|python_tag|>{{"name": "weather", "parameters": {A}}}')


RESPONSE_TEMPLATE = {
    "start_anchor": "assistant:",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open": "CALL",
            "close": "END",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
THINKS_AT_ONCE = f"{NO_TOOLS}assistant:<think>{{# </think> #}}"


async def test_a_tokenizer_with_a_response_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """It goes before the chat template, for answers of a free choice; the prompt may have begun a part of them."""
    own = deepcopy(tokenizer)
    own.response_template = RESPONSE_TEMPLATE
    bench = Bench(own, ApiSettings(chat_template=THINKS_AT_ONCE), max_model_len=1024)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        bench.says(f'Hm.</think>Yes.CALL{{"name": "weather", "arguments": {A}}}END')
        for choice in (await post(http, n=2, tools=[WEATHER]))["choices"]:
            message = choice["message"]
            assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
            assert (calls_of(message), choice["finish_reason"]) == ([("weather", A)], "tool_calls")
        deltas = [choice["delta"] for choice in await streamed(http, tools=[WEATHER])]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert [call["function"] for delta in deltas for call in delta.get("tool_calls", [])] == [
            {"name": "weather", "arguments": A}
        ]
        bench.says(f"Hm.</think>{CALL_A}")
        (choice,) = (await post(http, tools=[WEATHER], tool_choice="required"))["choices"]
        assert choice["message"]["reasoning_content"] == "Hm."
        assert calls_of(choice["message"]) == [("weather", A)]
        assert accepts(bench, f"Hm.</think>{CALL_A}")
        assert not accepts(bench, CALL_A)
        strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
        answer = await http.post("/v1/chat/completions", json=BODY | {"tools": [strict]})
        assert answer.json()["error"]["param"] == "tools[0].function.strict"
        answer = await http.post("/v1/chat/completions", json=BODY | allowed("auto", "now"))
        assert answer.json()["error"]["param"] == "tool_choice"
        asked = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
        answer = await http.post("/v1/chat/completions", json=BODY | asked)
        assert answer.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize(
    ("key", "text", "calls"),
    [
        ("llama3", f'{{"name": "weather", "parameters": {A}}}', [("weather", A)]),
        ("hermes", CALL_A, [("weather", A)]),
        ("tests.deployments.http.test_tools:ShoutingParser", "WEATHER!", [("weather", "{}")]),
    ],
)
async def test_a_parser_can_be_chosen(
    tokenizer: PreTrainedTokenizerFast, key: str, text: str, calls: list[tuple[str, str]]
) -> None:
    bench = Bench(tokenizer, ApiSettings(tool_parser=key, chat_template=NO_TOOLS), max_model_len=1024)
    bench.says(text)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        (choice,) = (await post(http, tools=[WEATHER]))["choices"]
        assert calls_of(choice["message"]) == calls


class ShoutingParser:
    """Takes a tool's name in capitals for a call of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompt: str, tools: list[dict[str, Any]]) -> None:
        assert prompt == "What weather?"
        self._names = [tool["function"]["name"] for tool in tools]
        self._text = ""

    def push(self, text: str) -> list[Any]:
        self._text += text
        return []

    def finish(self) -> list[Any]:
        from specdec.structured.parsing.calls import ToolCallDelta

        named = [name for name in self._names if self._text == f"{name.upper()}!"]
        return [ToolCallDelta(i, name, "{}") for i, name in enumerate(named)]
