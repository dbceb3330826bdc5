"""``/v1/responses`` in process: whole and streamed, by the official client's types and helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from deployments.http.app import create_app
from deployments.http.schemas.fields import REFUSED_IN_RESPONSES
from deployments.http.service import ApiSettings
from specdec.core.errors import SequenceFailedError
from specdec.core.grammar import Grammar
from specdec.core.types import TokenLogprobs
from specdec.protocol.ingress import TokenDelta
from tests.deployments.http.scripted import rounds

from ..conftest import TEXT, Bench, limits
from .responses_client import ASK, LOGPROBS, PATH, checked, events, read_events, rebuilt, whole


def prompt_of(bench: Bench) -> str:
    return bench.tokenizer.decode(list(bench.service.opened[-1].prompt))


def texts(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item["content"]]


async def test_a_response(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says(TEXT, 3)
    response = await whole(http, metadata={"a": "b"}, max_output_tokens=100, instructions="Be short.", seed=5)
    assert response["id"].startswith("resp_")
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    asked = {"metadata": {"a": "b"}, "max_output_tokens": 100, "instructions": "Be short.", "store": False}
    assert {name: response[name] for name in asked} == asked
    assert (response["model"], response["temperature"], response["top_p"]) == ("demo", 1.0, 0.9)
    num_prompt = len(bench.service.opened[0].prompt)
    num_output = len(bench.tokenizer.encode(TEXT)) + 1
    assert response["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_output,
    }
    assert prompt_of(bench) == "<|endoftext|># Be short.\n# Add.\n"
    assert bench.service.opened[0].spec.max_tokens == 100
    assert bench.metric("generation_tokens_total") == num_output
    assert bench.metric("http_requests_total", path=PATH, status="200") == 1


async def test_it_names_the_version_of_the_weights(tokenizer: PreTrainedTokenizerFast) -> None:
    bench = Bench(tokenizer, weights="sha256:w")
    bench.says(TEXT)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        assert (await whole(http))["weights_version"] == "sha256:w"
        assert {event["response"]["weights_version"] for event in await events(http) if "response" in event} == {
            "sha256:w"
        }


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("size", [1, 3, 100])
async def test_a_stream_tells_of_the_whole_response(
    bench: Bench, http: httpx2.AsyncClient, size: int, finish: str
) -> None:
    bench.says(TEXT, size, finish)
    found = await events(http, seed=5)
    status = {"stop": "completed", "length": "incomplete"}[finish]
    kinds = [event["type"].removeprefix("response.") for event in found]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[:4] == opening
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", status]
    first, last = found[0]["response"], found[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert last["output"] == rebuilt(found)
    assert texts(last) == [TEXT]
    assert last["output"][0]["status"] == last["status"] == status
    answer = await whole(http, seed=5)
    assert (texts(answer), answer["status"], answer["usage"]) == ([TEXT], status, last["usage"])
    assert answer["incomplete_details"] == (None if finish == "stop" else {"reason": "max_output_tokens"})
    assert bench.metric("generation_tokens_total") == 2 * last["usage"]["output_tokens"]
    assert bench.metric("generation_discarded_tokens_total") == 0


async def test_an_answer_without_a_word_has_an_empty_message(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("")
    found = await events(http)
    assert texts(found[-1]["response"]) == texts(await whole(http)) == [""]
    assert found[-1]["response"]["output"] == rebuilt(found)


async def test_the_official_clients_helpers(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says(TEXT, 3)
    answer = await client.responses.create(**ASK)
    assert answer.output_text == TEXT
    stream = await client.responses.create(**ASK, stream=True)
    assert "".join([event.delta async for event in stream if event.type == "response.output_text.delta"]) == TEXT
    async with client.responses.stream(**ASK) as stream:
        done = [event.text async for event in stream if event.type == "response.output_text.done"]
        final = await stream.get_final_response()
    assert (done, final.output_text, final.status) == ([TEXT], TEXT, "completed")
    assert final.usage == answer.usage


class Point(BaseModel):
    """What an answer holds."""

    x: int
    y: int


async def test_structured_output_by_the_official_clients_helpers(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says('{"x": 3, "y": 4}', 2)
    answer = await client.responses.parse(**ASK, text_format=Point)
    assert answer.output_parsed == Point(x=3, y=4)
    assert (answer.text.format.type, answer.text.format.name) == ("json_schema", "Point")
    async with client.responses.stream(**ASK, text_format=Point) as stream:
        assert (await stream.get_final_response()).output_parsed == Point(x=3, y=4)
    grammars = [request.spec.sampling.grammar for request in bench.service.opened]
    assert [grammar.kind for grammar in grammars] == ["json_schema"] * 2
    assert '"x"' in grammars[0].text


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"text": {"format": {"type": "text"}}}, None),
        ({"text": {"verbosity": "low"}}, None),
        ({"text": {"format": {"type": "json_object"}}}, Grammar("json_object")),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": None}}},
            Grammar("json_schema", "{}"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    ],
)
async def test_text_formats(
    bench: Bench, http: httpx2.AsyncClient, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    bench.says("{}")
    response = await whole(http, **fields)
    assert bench.service.opened[0].spec.sampling.grammar == grammar
    asked = fields.get("text", {}).get("format", {"type": "text"})
    assert {name: response["text"]["format"][name] for name in asked} == asked


async def test_items_are_turns_of_a_conversation(bench: Bench, client: AsyncOpenAI) -> None:
    """What a response gave can be sent back as it is."""
    bench.says("x = 1")
    first = await client.responses.create(**ASK)
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": part} for part in "ab"]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "Go on."},
    ]
    await client.responses.create(model="demo", input=items, instructions="Be kind.")
    assert prompt_of(bench) == "<|endoftext|># Be kind.\n# Be brief.\n# a\n# b\nx = 1\n\n\n# Go on.\n"


async def test_sampling_fields_reach_the_sequence(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("ok")
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "logit_bias": {"5": 1},
        "stop": "\n\n",
        "min_tokens": 2,
        "num_speculative_tokens": 3,
        "bad_words": ["foo"],
        "presence_penalty": 0.5,
    }
    response = await whole(http, **fields, per_request_spec_decode_metrics="summary", seed=9)
    spec = bench.service.opened[0].spec
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.logit_bias, sampling.min_tokens, sampling.presence_penalty) == (((5, 1.0),), 2, 0.5)
    assert sampling.bad_words
    assert spec.num_speculative_tokens == 3
    assert (response["temperature"], response["top_p"]) == (0.5, 0.25)
    assert response["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    await whole(http, seed=9)
    assert bench.service.opened[1].spec.seed == spec.seed


@pytest.mark.parametrize("size", [1, 2, 100])
async def test_log_probabilities(bench: Bench, http: httpx2.AsyncClient, size: int) -> None:
    text = "a = '🙂'"
    ids = [*bench.tokenizer.encode(text), 0]
    entries = [TokenLogprobs(-0.5 - i, 1, ((5, -0.25), (6, -1.0))) for i in range(len(ids))]
    bench.script = lambda request: rounds(
        ids, size, logprobs=None if request.spec.sampling.logprobs is None else entries
    )
    found = await events(http, **LOGPROBS)
    last = found[-1]["response"]
    assert last["output"] == rebuilt(found)
    told = last["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in told] == [entry.logprob for entry in entries]
    assert "".join(entry["token"] for entry in told[:3]) == bench.tokenizer.decode(ids[:3])
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)
    assert (await whole(http, **LOGPROBS))["output"][0]["content"] == last["output"][0]["content"]
    assert last["top_logprobs"] == 2
    assert bench.service.opened[0].spec.sampling.logprobs == 2
    assert (await whole(http))["output"][0]["content"][0]["logprobs"] == []


async def test_a_failure_in_the_middle_is_an_error_and_a_failed_response(
    bench: Bench, http: httpx2.AsyncClient
) -> None:
    said = bench.say("ok", 9, "length")[0]
    bench.script = lambda request: [TokenDelta(said.tokens, said.notes), SequenceFailedError("a hook raised")]
    found = await events(http)
    error, failed = found[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", "generation_failed", "a hook raised")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "a hook raised"}
    assert texts(failed["response"]) == ["ok"]
    answer = await http.post(PATH, json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")


async def test_a_failure_before_the_first_token_has_a_status(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.script = lambda request: [SequenceFailedError("no")]
    for stream in (False, True):
        assert (await http.post(PATH, json=ASK | {"stream": stream})).status_code == 500


async def test_the_oldest_turns_go_where_a_conversation_is_too_long_and_no_more_than_must(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The system messages stay, and a call's result goes with its call."""
    bench = Bench(tokenizer, max_model_len=128)
    bench.says("ok")
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "r"}
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i} " + "x " * 8} for i in range(20)]
    items = [{"role": "developer", "content": "system"}, *turns[:2], call, result, *turns[2:], turns[0]]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ask = {"instructions": "rules", "chat_template": template, "max_output_tokens": 20}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        refused = await http.post(PATH, json=ASK | ask | {"input": items})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        answer = await http.post(PATH, json=ASK | ask | {"input": items, "truncation": "auto"})
        assert (answer.status_code, answer.json()["truncation"]) == (200, "auto")
        prompt = [*bench.service.opened[-1].prompt]
        text = tokenizer.decode(prompt)
        assert text.startswith("<system>rules<system>system<user>turn ")
        first = next(i for i in range(0, 20, 2) if f"turn {i} " in text.removesuffix(turns[0]["content"]))
        kept = "".join(f"<{one['role']}>{one['content']}" for one in [*turns[first:], turns[0]])
        assert text == f"<system>rules<system>system{kept}"
        dropped = "".join(f"<{one['role']}>{one['content']}" for one in turns[first - 2 : first])
        assert len(prompt) + 20 <= 128 < len(prompt) + 20 + len(tokenizer.encode(dropped))
        whole_ = await http.post(PATH, json=ASK | ask | {"input": items[:2], "truncation": "auto"})
        assert whole_.status_code == 200
        assert tokenizer.decode([*bench.service.opened[-1].prompt]).endswith(turns[0]["content"])
        wrong = await http.post(
            PATH, json=ASK | ask | {"input": [*items, call | {"arguments": "["}], "truncation": "auto"}
        )
        assert wrong.json()["error"]["param"] == f"input[{len(items)}].arguments"


@pytest.mark.parametrize("name", sorted(REFUSED_IN_RESPONSES))
async def test_what_would_change_the_answer_is_refused_unless_neutral(
    http: httpx2.AsyncClient, refused: Callable[..., Any], name: str
) -> None:
    error = await refused(PATH, ASK | {name: {"made to": "matter"}})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    for value in (None, *REFUSED_IN_RESPONSES[name]):
        assert (await http.post(PATH, json=ASK | {name: value})).status_code == 200


async def test_what_changes_nothing_is_taken(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("ok")
    body = {
        "store": False,
        "background": False,
        "user": "me",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "truncation": "disabled",
        "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
        "stream": True,
        "safety_identifier": "s",
        "reasoning": {"effort": None, "summary": "auto"},
    }
    answer = await http.post(PATH, json=ASK | body)
    assert texts(read_events(answer.text)[-1]["response"]) == ["ok"]
    assert bench.metric("ignored_fields_total", field="reasoning.summary") == 1


async def test_the_templates_error_is_the_inputs(bench: Bench, http: httpx2.AsyncClient, refused: Any) -> None:
    error = await refused(PATH, ASK | {"chat_template": "{{ raise_exception('no') }}"})
    assert error["param"] == "chat_template"


async def test_prefixes_are_shared_as_with_chat(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("ok")
    await client.responses.create(**ASK)
    await client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Add."}])
    first, second = bench.service.opened
    assert (first.prompt, first.spec.cache_salt) == (second.prompt, second.spec.cache_salt)


def test_a_response_is_checked() -> None:
    """The check that other tests rest on can fail."""
    with pytest.raises(ValueError, match="created_at"):
        checked({"id": "x"})


async def test_limits_are_named_as_sent(bench: Bench) -> None:
    app = create_app(bench.service, ApiSettings(limits=limits(max_total_tokens=20)), bench.tokenizer, bench.observer)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as http:
        error = (await http.post(PATH, json=ASK | {"max_output_tokens": 50})).json()["error"]
    assert (error["param"], error["code"]) == ("max_output_tokens", "request_too_large")
