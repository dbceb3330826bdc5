"""Reasoning: apart from the answer, counted, bounded, and before whatever a grammar says."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from deployments.http.service import ApiSettings
from specdec.sampling.rows import RowGroup
from specdec.structured.compiler import Grammars
from specdec.structured.matchers import Matchers
from tests.deployments.http.scripted import rounds

from .bodies import SCHEMA, TOOL
from .conftest import Bench, accepts

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
THINKS = TURNS + "{# </think> <tool_call> tools #}"
BEGUN = TURNS + "<think>\n{# </think> #}"
CHOOSES = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
EFFORT = TURNS + "{{ reasoning_effort }}</think>"
ASK = [{"role": "user", "content": "Why?"}]
BODY: dict[str, Any] = {"model": "demo", "messages": ASK}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA | {"additionalProperties": False}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def tokenizer_with_tags(tokenizer: PreTrainedTokenizerFast, is_special: bool) -> PreTrainedTokenizerFast:
    """One whose reasoning tags are tokens."""
    own = deepcopy(tokenizer)
    tags = [AddedToken(name, special=is_special) for name in ("<think>", "</think>")]
    own.add_tokens(tags, special_tokens=is_special)
    return own


@pytest.fixture(params=["text", "token", "special"])
def bench(tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest) -> Bench:
    own = tokenizer if request.param == "text" else tokenizer_with_tags(tokenizer, request.param == "special")
    return Bench(own, max_model_len=512)


def think(bench: Bench, text: str, size: int = 2) -> None:
    ids = [*bench.tokenizer.encode(text), 0]
    bench.script = lambda request: rounds(ids, size)


async def post(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def prompt_of(bench: Bench) -> str:
    return str(bench.tokenizer.decode(list(bench.service.opened[-1].prompt)))


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (THINKS, "<think>\nAs it is <b>.\n\nOr so.\n</think>\n\nYes.\n", "As it is <b>.\n\nOr so.", "Yes.\n"),
        (THINKS, "Yes <think>.", None, "Yes <think>."),
        (BEGUN, "So.\n</think>\n\nYes.", "So.", "Yes."),
        (BEGUN, "So, and so", "So, and so", ""),
        (TURNS, "<think>So.</think>Yes.", None, "<think>So.</think>Yes."),
    ],
)
async def test_reasoning_is_no_content(
    bench: Bench, http: httpx2.AsyncClient, template: str, text: str, reasoning: str | None, content: str
) -> None:
    """Whole and in a stream."""
    think(bench, text)
    if template == TURNS:  # its tags mean nothing: special tokens are left out
        content = str(bench.tokenizer.decode(bench.tokenizer.encode(text), skip_special_tokens=True))
    message = (await post(http, chat_template=template))["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert message.get("reasoning") == reasoning
    answer = await http.post("/v1/chat/completions", json=BODY | {"chat_template": template, "stream": True, "n": 2})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    for index in range(2):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == (reasoning or "")
        assert "".join(delta.get("content") or "" for delta in deltas) == content
        told = [next(iter(delta)) for delta in deltas[1:] if delta]
        assert told == sorted(told, reverse=True), "reasoning comes first"


async def test_tokens_of_reasoning_are_in_the_usage(bench: Bench, http: httpx2.AsyncClient) -> None:
    text = "<think> a b c d</think> Yes."
    think(bench, text, 3)
    wanted = len(bench.tokenizer.encode(" a b c d", add_special_tokens=False))
    details = (await post(http, chat_template=THINKS, n=2))["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 2 * wanted}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/chat/completions", json=BODY | {"chat_template": THINKS} | options)
    last = json.loads(answer.text.split("\n\n")[-3][6:])
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": wanted}
    assert "completion_tokens_details" not in (await post(http, chat_template=TURNS))["usage"]


async def test_reasoning_can_be_left_out(bench: Bench, http: httpx2.AsyncClient) -> None:
    think(bench, f"So.</think>\n{CALL}")
    template = BEGUN + "{# <tool_call> tools #}"
    answer = await post(http, chat_template=template, include_reasoning=False, tools=[TOOL])
    message = answer["choices"][0]["message"]
    assert not {"reasoning", "reasoning_content"} & set(message)
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_the_tags_are_a_matter_of_configuration(tokenizer: PreTrainedTokenizerFast) -> None:
    for tags, text, reasoning, content in (
        ("none", "<think>a</think>b", None, "<think>a</think>b"),
        ("auto", "[THINK]a[/THINK]b", None, "[THINK]a[/THINK]b"),
        ("[THINK], [/THINK]", "[THINK]a[/THINK]b", "a", "b"),
    ):
        bench = Bench(tokenizer, ApiSettings(reasoning_tags=tags, chat_template=THINKS))
        think(bench, text)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
            message = (await post(http))["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


async def test_the_template_is_told_of_the_effort(bench: Bench, http: httpx2.AsyncClient) -> None:
    think(bench, "ok")
    start = "user: Why?\nassistant: "
    off = f"{start}<think>\n\n</think>\n\n"
    for template, effort, prompt in (
        (CHOOSES, "none", off),
        (CHOOSES, "high", start),
        (CHOOSES, None, start),
        (EFFORT, "low", f"{start}low</think>"),
        (TURNS, "none", start),
    ):
        fields = {"chat_template": template, "reasoning_effort": effort}
        await post(http, **fields)
        assert prompt_of(bench) == prompt
        tokens = (await http.post("/tokenize", json={"messages": ASK} | fields)).json()["tokens"]
        assert tokens == list(bench.service.opened[-1].prompt)
    await post(http, chat_template=CHOOSES, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert prompt_of(bench) == start
    for effort, is_ignored in (("low", True), ("none", False), (None, False)):
        fields = BODY | {"chat_template": TURNS, "reasoning_effort": effort}
        before = bench.metric("ignored_fields_total", field="reasoning_effort")
        answer = await http.post("/v1/chat/completions", json=fields)
        now = bench.metric("ignored_fields_total", field="reasoning_effort")
        assert (answer.status_code, now - before) == (200, is_ignored)
        assert prompt_of(bench) == start


async def test_earlier_reasoning_reaches_the_template(bench: Bench, http: httpx2.AsyncClient) -> None:
    """By either of its names, or by both, as answers have it."""
    think(bench, "ok")
    said = {"role": "assistant", "content": "So."}
    names = ("reasoning", "reasoning_content")
    for sent in ((names[0],), (names[1],), names):
        turns = [*ASK, said | dict.fromkeys(sent, "Hm."), *ASK]
        for read in names:
            await post(http, messages=turns, chat_template=f"{{{{ messages[1].{read} }}}}")
            assert prompt_of(bench) == "Hm."
    turns = [*ASK, said | {"reasoning": "Hm.", "reasoning_content": "Oh."}]
    answer = await http.post("/v1/chat/completions", json=BODY | {"messages": turns})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[1].reasoning")
    assert "differ" in error["message"]


async def test_a_grammar_begins_where_the_reasoning_ends(bench: Bench, http: httpx2.AsyncClient) -> None:
    think(bench, "ok")
    await post(http, chat_template=BEGUN, response_format=FORMAT)
    for text in ('Why {"b": not?\n</think>\n\n{"a": 1}', '</think>{"a": 1}', '</thin </think>\n{"a": 1}'):
        assert accepts(bench, text), text
    for text in ('{"a": 1}', "So.", 'So.</think>{"b": 1}', 'So.</think>\n\n\n{"a": 1}', 'So.</think>{"a": 1}</think>'):
        assert not accepts(bench, text), text
    await post(http, chat_template=THINKS, response_format=FORMAT)
    for text in ('{"a": 1}', '<think>So.</think>\n\n{"a": 1}'):
        assert accepts(bench, text), text
    for text in ("So.", 'So.</think>{"a": 1}', '<think>So.</think>{"b": 1}'):
        assert not accepts(bench, text), text
    await post(http, chat_template=THINKS, tools=[TOOL], tool_choice="required")
    for text in (CALL, f"<think>So.</think>\n{CALL}\n{CALL}"):
        assert accepts(bench, text), text
    for text in ("So.", "<think>So.</think>so", f"So.</think>{CALL}"):
        assert not accepts(bench, text), text
    await post(http, chat_template=CHOOSES + "{# </think> #}", response_format=FORMAT, reasoning_effort="none")
    assert accepts(bench, '{"a": 1}')
    assert not accepts(bench, '<think>So.</think>{"a": 1}')


@pytest.mark.parametrize("is_special", [False, True])
async def test_a_budget_of_reasoning(tokenizer: PreTrainedTokenizerFast, is_special: bool) -> None:
    bench = Bench(tokenizer_with_tags(tokenizer, is_special), max_model_len=512)
    think(bench, "ok")
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        await post(http, chat_template=BEGUN, thinking_token_budget=3)
        for text in (" a b c</think> Yes <think> it is", " a b", "", "</think>"):
            assert accepts(bench, text), text
        assert not accepts(bench, " a b c d")
        await post(http, chat_template=THINKS, thinking_token_budget=3)
        for text in ("<think> a b c</think> Yes", " a b c d e", ""):
            assert accepts(bench, text), text
        assert not accepts(bench, "<think> a b c d")
        await post(http, chat_template=BEGUN, thinking_token_budget=3, response_format=FORMAT)
        assert accepts(bench, ' a b c</think>{"a": 1}')
        for text in (' a b c d</think>{"a": 1}', " a b c</think>Yes", " a"):
            assert not accepts(bench, text), text
        await post(http, chat_template=BEGUN, thinking_token_budget=2**31 - 1)
        assert accepts(bench, " a b c d</think> Yes")
        await post(http, chat_template=BEGUN, thinking_token_budget=0)
        assert accepts(bench, "</think> Yes")
        assert not accepts(bench, " a")


async def test_no_end_of_sequence_token_ends_an_answer_within_its_reasoning(tokenizer: PreTrainedTokenizerFast) -> None:
    """Models may have several: the tokenizer's own and that of a turn."""
    bench = Bench(tokenizer_with_tags(tokenizer, True), max_model_len=512, eos_token_ids=(0, 2))
    think(bench, "a</think>{}")
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        await post(http, chat_template=BEGUN, response_format=FORMAT)
    spec = bench.service.opened[-1].spec
    assert spec.eos_token_ids == (0, 2)
    thought = bench.tokenizer.encode("because")
    after = [*thought, *bench.tokenizer.encode("</think>")]
    matchers = Matchers(Grammars(bench.tokenizer, len(bench.tokenizer), (0, 2)))
    for tokens in (thought, after):
        (masked,), _ = matchers.masked([RowGroup(spec, [*([5] * spec.output_start), *tokens])])
        assert masked.mask is not None
        assert int(masked.mask[0, 0]) & 0b101 == 0, "neither of them is allowed"


async def test_a_budget_that_cannot_be_kept_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    bench = Bench(tokenizer)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        for template, reason in ((TURNS, "no reasoning"), (THINKS, "not one token"), (BEGUN, "not one token")):
            for extra in ({}, {"response_format": FORMAT}):
                body = BODY | {"chat_template": template, "thinking_token_budget": 3} | extra
                answer = await http.post("/v1/chat/completions", json=body)
                error = answer.json()["error"]
                assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_parameter")
                assert reason in error["message"]


async def test_a_message_that_is_gone_on_with(bench: Bench, http: httpx2.AsyncClient) -> None:
    think(bench, "and so.</think>Yes.")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    for begun, reasoning in (("<think>So", "and so."), ("<think>So</think>", None)):
        turns = [*ASK, {"role": "assistant", "content": begun}]
        answer = await post(http, messages=turns, continue_final_message=True, chat_template=template)
        assert answer["choices"][0]["message"].get("reasoning_content") == reasoning


async def test_the_official_client_shows_it(bench: Bench, client: AsyncOpenAI) -> None:
    think(bench, "So.</think>Yes.")
    extra = {"chat_template": BEGUN}
    answer = await client.chat.completions.create(**BODY, extra_body=extra)
    assert answer.choices[0].message.reasoning_content == "So."
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
