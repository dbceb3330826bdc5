"""Tools and reasoning of ``/v1/responses``: the same prompts and grammars as chat's, items and events of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerFast

from deployments.http.service import ApiSettings
from specdec.core.types import TokenLogprobs
from tests.deployments.http.scripted import rounds

from ..bodies import RESPONSES
from ..conftest import Bench, accepts
from ..test_reasoning import BEGUN, tokenizer_with_tags
from ..test_tools import BODY as CHAT
from ..test_tools import (
    CALL_A,
    CALL_B,
    LLAMA_LIKE,
    NO_TOOLS,
    RESPONSE_TEMPLATE,
    THINKS_AT_ONCE,
    UNKNOWN_SCHEMA,
    WEATHER,
    A,
    B,
)
from .responses_client import PATH, checked, events, read_events, rebuilt, whole

FLAT = [{"type": "function", **tool["function"]} for tool in CHAT["tools"]]
ASK = {"input": "What weather?", "tools": FLAT}
NAMED = {"type": "function", "name": "weather"}
THINKS = (
    "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}{# tools: <tool_call> </think> #}"
)
EFFORTS = "{{ reasoning_effort }}{{ messages[0].content }}</think>"


@pytest.fixture
def bench(tokenizer: PreTrainedTokenizerFast) -> Bench:
    return Bench(tokenizer, max_model_len=1024)


def name_and_text(item: dict[str, Any]) -> tuple[str, str]:
    """A kind and a text."""
    match item["type"]:
        case "message":
            (part,) = item["content"]
            return "", part["text"]
        case "reasoning":
            (part,) = item["content"]
            return "thought", part["text"]
    assert item["call_id"].startswith("call_")
    return item["name"], item["arguments"]


ANSWERS: list[tuple[dict[str, Any], str, list[tuple[str, str]]]] = [
    ({}, CALL_A, [("weather", A)]),
    ({}, f"I look.\n{CALL_A}\n{CALL_B}", [("", "I look."), ("weather", A), ("now", B)]),
    ({}, "No tools.\n", [("", "No tools.\n")]),
    ({"tool_choice": "none"}, CALL_A, [("", CALL_A)]),
    ({"tool_choice": "required"}, f"{CALL_A}\n{CALL_B}", [("weather", A), ("now", B)]),
    ({"tool_choice": NAMED}, CALL_A, [("weather", A)]),
    ({"chat_template": LLAMA_LIKE}, f'{{"name": "weather", "parameters": {A}}}', [("weather", A)]),
    ({"chat_template": THINKS}, "<think>\nHm.\n</think>\n\nYes.", [("thought", "Hm."), ("", "Yes.")]),
    ({"chat_template": THINKS}, f"<think>Hm.</think>{CALL_B}", [("thought", "Hm."), ("now", B)]),
    ({"chat_template": THINKS, "include_reasoning": False}, f"<think>Hm.</think>{CALL_B}", [("now", B)]),
]


@pytest.mark.parametrize("size", [1, 4, 200])
@pytest.mark.parametrize(("fields", "text", "items"), ANSWERS)
async def test_items_whole_and_streamed(
    bench: Bench, http: httpx2.AsyncClient, fields: dict[str, Any], text: str, items: list[tuple[str, str]], size: int
) -> None:
    bench.says(text, size)
    response = await whole(http, **ASK | fields)
    assert [name_and_text(item) for item in response["output"]] == items
    assert {item["status"] for item in response["output"]} == {response["status"]} == {"completed"}
    found = await events(http, **ASK | fields)
    last = found[-1]["response"]
    assert [name_and_text(item) for item in last["output"]] == items
    assert last["output"] == rebuilt(found)
    assert last["usage"] == response["usage"]
    ids = [item["id"] for item in last["output"]]
    assert len(set(ids)) == len(ids)
    # An item has ended before the next begins.
    ends = [event["type"].rpartition(".")[2] for event in found if "output_item" in event["type"]]
    assert ends == ["added", "done"] * len(items)


async def test_by_a_response_template(tokenizer: PreTrainedTokenizerFast) -> None:
    own = deepcopy(tokenizer)
    own.response_template = RESPONSE_TEMPLATE
    bench = Bench(own, ApiSettings(chat_template=THINKS_AT_ONCE), max_model_len=1024)
    bench.says(f'Hm.</think>Yes.CALL{{"name": "weather", "arguments": {A}}}END', 3)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        asked = ASK | {"tools": [{"type": "function", **WEATHER["function"]}]}  # type: ignore[dict-item]
        response, found = await whole(http, **asked), await events(http, **asked)
    for output in (response["output"], found[-1]["response"]["output"], rebuilt(found)):
        assert [name_and_text(item) for item in output] == [("thought", "Hm."), ("", "Yes."), ("weather", A)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_of_reasoning_is_that_of_chat(tokenizer: PreTrainedTokenizerFast, stream: bool) -> None:
    """In streams, and of several choices, too."""
    bench = Bench(tokenizer_with_tags(tokenizer, True), max_model_len=1024)
    bench.says("So.</think>Yes.")
    budget = {"model": "demo", "chat_template": BEGUN, "thinking_token_budget": 3, "stream": stream}
    chat = {"messages": CHAT["messages"], "n": 2}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        for path, fields in ((PATH, {"input": ASK["input"]}), ("/v1/chat/completions", chat)):
            answer = await http.post(path, json=budget | fields)
            assert answer.status_code == 200, answer.text
            assert '"reasoning_' in answer.text
            assert accepts(bench, " a b c</think> Yes")
            assert not accepts(bench, " a b c d")
    assert len({one.spec.sampling.grammar for one in bench.service.opened}) == 1
    assert len(bench.service.opened) == 3


async def test_arguments_come_in_pieces(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says(CALL_A)
    found = await events(http, **ASK)
    pieces = [event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) >= 6
    assert "".join(pieces) == A
    assert found[2]["item"]["arguments"] == ""


async def test_an_answer_that_is_cut_off_has_half_a_call(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says(f"Yes.{CALL_A[:60]}", finish="length")
    response = await whole(http, **ASK)
    message, call = response["output"]
    assert (response["status"], message["status"], call["status"]) == ("incomplete", "completed", "incomplete")
    assert A.startswith(call["arguments"])


async def test_what_was_asked_for_is_sent_back(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says(CALL_A)
    response = await whole(http, **ASK, tool_choice=NAMED, parallel_tool_calls=False)
    assert (response["tool_choice"], response["parallel_tool_calls"]) == (NAMED, False)
    for shown, sent in zip(response["tools"], FLAT, strict=True):
        assert {name: value for name, value in shown.items() if value is not None} == sent
    assert (await whole(http, **ASK, tool_choice=ALLOWED))["tool_choice"] == ALLOWED
    response = await whole(http)
    assert (response["tools"], response["tool_choice"], response["parallel_tool_calls"]) == ([], "auto", True)
    response = await whole(http, reasoning={"effort": "high"}, chat_template=EFFORTS)
    assert response["reasoning"] == {"effort": "high", "summary": None}


OF_CHAT = {"type": "function", "function": {"name": "weather"}}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
CHOICES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tool_choice": "none"}, {"tool_choice": "none"}),
    ({"tool_choice": "required"}, {"tool_choice": "required"}),
    ({"tool_choice": "required", "parallel_tool_calls": False},) * 2,
    ({"tool_choice": NAMED}, {"tool_choice": OF_CHAT}),
    (
        {"tool_choice": ALLOWED},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OF_CHAT]}}},
    ),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"reasoning": {"effort": "low"}, "chat_template": EFFORTS + "<tool_call> tools"},) * 2,
    ({"chat_template": THINKS, "tool_choice": "required"},) * 2,
]


@pytest.mark.parametrize(("fields", "of_chat"), CHOICES)
async def test_prompt_and_grammar_are_those_of_chat(
    bench: Bench, http: httpx2.AsyncClient, fields: dict[str, Any], of_chat: dict[str, Any]
) -> None:
    bench.says("ok")
    await whole(http, **ASK | fields)
    if "reasoning" in of_chat:
        of_chat = {"reasoning_effort": "low", "chat_template": of_chat["chat_template"]}
    answer = await http.post("/v1/chat/completions", json=CHAT | of_chat)
    assert answer.status_code == 200, answer.text
    ours, theirs = bench.service.opened
    assert (ours.prompt, ours.spec.sampling) == (theirs.prompt, theirs.spec.sampling)


async def test_a_conversation_is_that_of_chat(bench: Bench, http: httpx2.AsyncClient, client: AsyncOpenAI) -> None:
    """The items of an answer go back as they came, with the results of its calls."""
    bench.says(f"<think>Hm.</think>I look.\n{CALL_A}\n{CALL_B}")
    first = await client.responses.create(model="demo", **ASK, extra_body={"chat_template": THINKS})
    calls = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{i}."} for i, call in enumerate(calls)
    ]
    results[1]["output"] = [{"type": "input_text", "text": "1."}]
    bench.says("ok")
    template = {"chat_template": "{{ messages | tojson }}<tool_call>"}
    asked = {"role": "user", "content": "What weather?"}
    items = [asked, *(item.to_dict() for item in first.output), *results, {"role": "user", "content": "So?"}]
    await client.responses.create(model="demo", input=items, tools=FLAT, extra_body=template)
    ours = json.loads(bench.tokenizer.decode(list(bench.service.opened[-1].prompt)).removesuffix("<tool_call>"))
    written = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for call in calls
    ]
    thought = dict.fromkeys(("reasoning_content", "reasoning"), "Hm.")
    assistant = {"role": "assistant", "content": "I look.", "tool_calls": written} | thought
    tools = [
        {"role": "tool", "content": f"{i}.", "name": call.name, "tool_call_id": call.call_id}
        for i, call in enumerate(calls)
    ]
    for message in ours:
        message.pop("thinking", None)  # transformers' other name of the reasoning
    assert ours == [asked, assistant, *tools, {"role": "user", "content": "So?"}]


def call(number: int, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": str(number), "name": "now", "arguments": arguments}


async def test_which_items_are_one_message(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("ok")
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    said = {"role": "assistant", "content": "a"}
    items = [
        thought,
        call(1),
        result,
        call(2),
        thought,
        call(3),
        said,
        said,
        call(4),
        thought,
        {"role": "user", "content": "u"},
    ]
    said_so = "{{ m.role[0] }}{{ m.reasoning_content or '' }}{{ m.content }}{{ (m.tool_calls or []) | length }} "
    shape = f"{{% for m in messages %}}{said_so}{{% endfor %}}"
    await whole(http, input=items, chat_template=shape)
    prompt = bench.tokenizer.decode(list(bench.service.opened[-1].prompt))
    assert prompt == "aHm.1 tx0 a1 aHm.1 aa0 aa1 uu0 "


async def test_reasoning_is_counted_and_has_no_log_probabilities(bench: Bench, http: httpx2.AsyncClient) -> None:
    """Those of the message are told; the tokens of tags, reasoning and calls are not part of it."""
    thought, said = "<think>Hm, so.", "Yes, I do."
    parts = [bench.tokenizer.encode(text) for text in (thought, "</think>", said, CALL_B)]
    ids = [*chain(*parts), 0]
    entries = [TokenLogprobs(-float(i), 1) for i in range(len(ids))]
    asked = {"include": ["message.output_text.logprobs"], "chat_template": THINKS}
    for size in (1, 3, 200):
        bench.script = lambda request, size=size: rounds(
            ids, size, logprobs=None if request.spec.sampling.logprobs is None else entries
        )
        found = await events(http, **ASK, **asked)
        response = found[-1]["response"]
        assert [name_and_text(item)[0] for item in response["output"]] == ["thought", "", "now"]
        logprobs = response["output"][1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in logprobs).endswith(said)
        assert not any("Hm" in entry["token"] or "tool" in entry["token"] for entry in logprobs)
        assert response["output"] == rebuilt(found)
        assert (await whole(http, **ASK, **asked))["output"][1]["content"] == response["output"][1]["content"]
        usage = (await http.post("/v1/chat/completions", json=CHAT | {"chat_template": THINKS})).json()["usage"]
        assert response["usage"]["output_tokens_details"] == usage["completion_tokens_details"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 3


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
    ({"tools": [FLAT[0], {"type": "file_search", "vector_store_ids": []}]}, "tools[1].type", "'file_search'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "required"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "pattern"),
    ({"tools": [FLAT[2]] * 2}, "tools", "'now'"),
    ({"tools": [FLAT[2] | {"defer_loading": True}]}, "tools[0].defer_loading", "only false"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": None, "tool_choice": NAMED}, "tool_choice", "needs tools"),
    ({"tools": [FLAT[2]], "tool_choice": NAMED}, "tool_choice", "'weather'"),
    ({"tool_choice": "any"}, "tool_choice", "required"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "'web_search'"),
    ({"tools": [FLAT[2]], "tool_choice": ALLOWED}, "tool_choice", "'weather'"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice", "allows none"),
    ({"tool_choice": ALLOWED | {"tools": [{"type": "mcp"}]}}, "tool_choice.tools[0].type", "'mcp'"),
    (
        {"tools": [{"type": "function", "name": "f", "parameters": UNKNOWN_SCHEMA}], "tool_choice": "required"},
        "tools[0].parameters",
        "uniqueItems",
    ),
    ({"chat_template": NO_TOOLS}, "tools", "has no tools"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "the field to send is reasoning"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "no reasoning"),
    ({"input": [{"role": "user", "content": "x"}, call(1), call(2, "[]")]}, "input[2].arguments", "an object"),
    ({"instructions": "i", "input": [call(1, "{")]}, "input[0].arguments", "JSON text"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "required"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": {}}]}, "input[0].output", "a string"),
    (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]},
        "input[0].output[0].type",
        "input_text",
    ),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
async def test_what_is_wrong_is_refused_in_the_requests_words(
    bench: Bench, refused: Callable[..., Any], fields: dict[str, Any], param: str, reason: str
) -> None:
    error = await refused(PATH, {"model": "demo"} | ASK | fields)
    assert error["param"] == param
    assert param in error["message"]
    assert reason in error["message"]
    assert not any(name in error["message"] for name in ("messages[", ".function."))
    assert not bench.service.opened


async def test_a_choice_among_no_tools_is_taken_where_it_is_free(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("ok")
    for choice in ("auto", "none"):
        assert (await whole(http, tool_choice=choice))["tool_choice"] == choice


OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "local_shell"},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_are_no_functions_are_left_out_where_the_service_is_told_so(
    tokenizer: PreTrainedTokenizerFast, stream: bool
) -> None:
    """As agents send them with their first request, where unknown fields are refused too."""
    bench = Bench(tokenizer, ApiSettings(unsupported_tools="drop", unknown_fields="refuse"), max_model_len=1024)
    bench.says("ok")
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        answers = [
            await http.post(PATH, json={"model": "demo", "stream": stream} | ASK | {"tools": tools})
            for tools in ([OTHERS[0], *FLAT, *OTHERS[1:]], FLAT, OTHERS)
        ]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert bench.metric("ignored_fields_total", field="tools.type") == 2
        some, functions, none = (
            read_events(answer.text)[-1]["response"] if stream else answer.json() for answer in answers
        )
        assert [tool["name"] for tool in some["tools"]] == [tool["name"] for tool in FLAT]
        assert (some["tools"], none["tools"]) == (functions["tools"], [])
        prompts = [request.prompt for request in bench.service.opened]
        assert prompts[0] == prompts[1] != prompts[2]
        refused = await http.post(PATH, json={"model": "demo"} | ASK | {"tools": OTHERS, "tool_choice": "required"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("name", RESPONSES)
async def test_bodies_of_clients(bench: Bench, http: httpx2.AsyncClient, name: str) -> None:
    """Each is served, or refused by name."""
    bench.says("ok")
    body, param = RESPONSES[name]
    answer = await http.post(PATH, json={"model": "demo", "input": "Add."} | body)
    if param is not None:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        return
    assert answer.status_code == 200, answer.text
    response = read_events(answer.text)[-1]["response"] if body.get("stream") else answer.json()
    assert checked(response).output_text == "ok"


async def test_so_many_calls_are_taken_in_a_row_and_no_more(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("ok")
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = {"role": "user", "content": "x"}
    await whole(http, input=[*[call] * 128, said, *[call] * 128], chat_template=NO_TOOLS)
    answer = await http.post(PATH, json={"model": "demo", "input": [call] * 129})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[128]"
    assert "at most 128 calls in a row" in answer.json()["error"]["message"]
