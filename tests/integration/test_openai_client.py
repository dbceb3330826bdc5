"""The official client against the running service."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import httpx2
import openai
import pytest
from openai import OpenAI
from openai.types import CompletionUsage
from pydantic import BaseModel, Field

from tests.integration.running import RunningService, eventually, nothing_held

PROMPT = "def read_file(path):\n"


@pytest.fixture
def client(service: RunningService) -> OpenAI:
    return service.client()


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="another", prompt=PROMPT)
    assert caught.value.body["code"] == "model_not_found"


def test_the_draft_is_no_model_that_requests_can_name(client: OpenAI) -> None:
    (target,) = [listed.id for listed in client.models.list().data]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=f"{target}-draft", prompt="x", max_tokens=1)


class Tag(BaseModel):
    """Of an order."""

    name: Annotated[str, Field(max_length=8)]
    weight: Annotated[int, Field(ge=0, le=99)]


class Order(BaseModel):
    """What the model is to write."""

    kind: Literal["new", "old"]
    tags: Annotated[list[Tag], Field(max_length=2)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output_by_the_clients_own_helpers(client: OpenAI, model: str, temperature: float) -> None:
    """Whatever is drafted; in a stream as well."""
    messages = [{"role": "user", "content": "Describe an order as JSON."}]
    options = {"model": model, "messages": messages, "max_tokens": 120, "temperature": temperature, "seed": 5}
    orders = []
    for num_speculative_tokens in (0, 4, 8):
        extra = {"num_speculative_tokens": num_speculative_tokens}
        answer = client.chat.completions.parse(**options, response_format=Order, extra_body=extra)
        assert answer.choices[0].finish_reason == "stop"
        orders.append(answer.choices[0].message.parsed)
    with client.chat.completions.stream(**options, response_format=Order) as stream:
        orders.append(stream.get_final_completion().choices[0].message.parsed)
    assert isinstance(orders[0], Order)
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools_by_the_clients_own_helpers(client: OpenAI, model: str, stream: bool) -> None:
    """Well-formed, not wise: two calls whose arguments are valid, with their results sent back, then an answer."""
    kinds: dict[str, type[BaseModel]] = {"Tag": Tag, "Order": Order}
    tools = [openai.pydantic_function_tool(kind) for kind in kinds.values()]
    options = {"model": model, "tools": tools, "max_tokens": 160, "temperature": 1.0, "seed": 5}
    messages: list[Any] = [{"role": "user", "content": "Order two things."}]
    for choice in ("required", {"type": "function", "function": {"name": "Tag"}}):
        asked = options | {"messages": messages, "tool_choice": choice, "parallel_tool_calls": False}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.parse(**asked)
        assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, kinds[call.function.name])
        messages += [
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "Done."},
        ]
    last = client.chat.completions.create(**options | {"messages": messages, "tool_choice": "none", "max_tokens": 16})
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls


def test_responses_by_the_clients_own_helpers(client: OpenAI, model: str) -> None:
    """Created, parsed and streamed; a tool's result sent back."""
    options = {"model": model, "max_output_tokens": 120, "temperature": 1.0, "extra_body": {"seed": 5}}
    asked: list[Any] = [{"role": "user", "content": "Describe an order as JSON."}]
    whole = client.responses.create(input=asked, **options)
    with client.responses.stream(input=asked, **options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == whole.output_text
    assert whole.usage.output_tokens <= 120
    answer = client.responses.parse(input=asked, text_format=Order, **options)
    with client.responses.stream(input=asked, text_format=Order, **options) as stream:
        streamed = stream.get_final_response()
    assert answer.output_parsed == streamed.output_parsed
    assert isinstance(answer.output_parsed, Order)
    tools: Any = [openai.pydantic_function_tool(Order)]
    called = client.responses.parse(
        input=asked, tools=tools, tool_choice="required", parallel_tool_calls=False, **options
    )
    (call,) = called.output
    assert isinstance(call.parsed_arguments, Order)
    sent = call.model_dump()
    items = [*asked, sent, {"type": "function_call_output", "call_id": call.call_id, "output": "Done."}]
    assert client.responses.parse(input=items, tools=tools, tool_choice="none", **options).output_text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [({"type": "objec"}, "Invalid type: objec"), ({"type": "integer", "multipleOf": 99999989}, "too much time")],
)
def test_a_grammar_that_cannot_be_compiled_is_the_clients_error(
    client: OpenAI, model: str, schema: dict[str, Any], reason: str
) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "a"}], response_format=wrong, max_tokens=4
        )
    assert caught.value.body["param"] == "response_format.json_schema.schema"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(client: OpenAI, model: str, temperature: float) -> None:
    texts = set()
    for num_speculative_tokens in (0, 1, 4, 8):
        answer = client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=48,
            temperature=temperature,
            seed=5,
            extra_body={"num_speculative_tokens": num_speculative_tokens},
        )
        texts.add(answer.choices[0].text)
        assert answer.usage.completion_tokens == 48
        assert answer.choices[0].finish_reason == "length"
    assert len(texts) == 1


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI, model: str) -> None:
    options = {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "seed": 1}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len(chunks) > 5


def test_a_stream_tells_how_its_tokens_came_and_when_both_models_worked(client: OpenAI, model: str) -> None:
    chunks = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_speculation": True},
        extra_body={"num_speculative_tokens": 4, "per_request_spec_decode_metrics": "summary"},
    )
    chunks = list(chunks)
    came = [chunk.choices[0].specdec for chunk in chunks if chunk.choices]
    kinds = [kind for one in came for kind in one["kind"]]
    drafted = [count for one in came for count in one["num_draft_tokens"]]
    times = [entry for one in came for entry in one["times"]]
    told = chunks[-1].metrics["speculative_decoding"]
    assert len(kinds) == len(drafted) == len(times) == 60
    assert (sum(drafted), kinds.count("accepted")) == (told["num_draft_tokens"], told["num_accepted_draft_tokens"])
    assert [entry is not None for entry in times] == [
        kind != "accepted" or n > 0 for kind, n in zip(kinds, drafted, strict=True)
    ]
    targets = [entry["target"] for entry in times if entry]
    assert targets == sorted(targets)
    assert all(start < end for start, end in targets)
    assert sum(len(entry["draft"]) for entry in times if entry) > 0


def test_chat(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "a function that adds two numbers"}]
    options = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**options, **with_usage))
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    chunks = chunks[:-1]
    assert whole.choices[0].message.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_a_stop_string_ends_the_text_before_it(client: OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=48, temperature=0)
    stop = whole.choices[0].text[20:26]
    cut = client.completions.create(model=model, prompt=PROMPT, max_tokens=48, temperature=0, stop=[stop])
    assert cut.choices[0].text == whole.choices[0].text.split(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_samples_differ_by_seed_and_come_with_their_logprobs(client: OpenAI, model: str) -> None:
    options = {"model": model, "prompt": PROMPT, "max_tokens": 12, "n": 3, "seed": 7, "temperature": 1, "logprobs": 2}
    first, again = (client.completions.create(**options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    for choice in first.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    streamed = ["", "", ""]
    for chunk in client.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_chat_logprobs_and_samples(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "a function that adds two numbers"}]
    options = {"model": model, "messages": messages, "max_completion_tokens": 8, "n": 2, "seed": 3}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    for choice in answer.choices:
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)


def test_raw_responses_carry_the_requests_id(client: OpenAI, model: str) -> None:
    options = {"model": model, "prompt": PROMPT, "max_tokens": 4, "extra_headers": {"x-request-id": "mine"}}
    raw = client.completions.with_raw_response.create(**options)
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id == "cmpl-mine"
    with client.completions.with_streaming_response.create(**options, stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert list(streamed.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_what_is_too_much_is_refused_and_served_when_sent_again(client: OpenAI, model: str) -> None:
    held = {"model": model, "prompt": PROMPT, "n": 32, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    small = {"model": model, "prompt": PROMPT, "max_tokens": 4}
    streams = [client.completions.create(**held, stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**small)
    assert caught.value.body["code"] == "overloaded"
    assert caught.value.response.headers["retry-after"] == "1"
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(client.with_options(max_retries=10).completions.create, **small)
        for stream in streams:
            stream.close()
        assert again.result().usage.completion_tokens == 4


def test_timeouts_of_either_side_end_the_generation(service: RunningService, client: OpenAI, model: str) -> None:
    long = {"model": model, "prompt": PROMPT, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**long)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**long, extra_headers={"x-request-timeout-seconds": "0.6"})
    assert (caught.value.status_code, caught.value.body["code"]) == (504, "request_timeout")
    eventually(lambda: nothing_held(service), 60, "both have been cancelled")


def test_many_at_once_are_each_what_they_are_alone(client: OpenAI, model: str) -> None:
    def ask(i: int) -> str:
        prompt, temperature = f"class Thing{i}:\n", i % 2
        options = {"max_tokens": 12 + i, "temperature": temperature, "seed": i}
        return client.completions.create(model=model, prompt=prompt, **options).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == [ask(i) for i in range(12)]


def test_a_burst_reads_its_common_prefix_once(service: RunningService, client: OpenAI, model: str) -> None:
    """16 requests at once behind one system prompt, then 16 samples of another prompt: each prefix is read once."""
    num_at_once, num_common = 16, 1984
    options: dict[str, Any] = {"model": model, "max_tokens": 4}

    def reused() -> float:
        return service.worker_gauge("reused_tokens")["target"]

    def ask(i: int) -> CompletionUsage:
        prompt = [100 + k % 997 for k in range(num_common)] + [1500 + i] * 50
        return client.completions.create(prompt=prompt, **options).usage

    before = reused()
    with ThreadPoolExecutor(num_at_once) as pool:
        usages = list(pool.map(ask, range(num_at_once)))
    num_cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert sum(usage.prompt_tokens for usage in usages) == num_at_once * (num_common + 50)
    assert num_cached == (num_at_once - 1) * num_common
    eventually(lambda: reused() - before == num_cached, 30, "the target says that it reused these tokens")

    before = reused()
    client.completions.create(prompt=[1400 - k % 991 for k in range(2000)], n=num_at_once, **options)
    num_shared = (2000 - 1) // 16 * 16  # the last token is always computed
    eventually(lambda: reused() - before == (num_at_once - 1) * num_shared, 30, "15 samples reused the first one's")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"n_predict": 2}, "n_predict"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_bad_input_is_refused_by_name(service: RunningService, model: str, change: dict, param: str) -> None:
    body = {"model": model, "prompt": PROMPT, **change}
    answer = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param, error
    assert set(error) == {"message", "type", "param", "code"}


def test_errors_reach_the_official_client(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=5000)
    assert caught.value.body["code"] == "context_length_exceeded"


def test_prompts_are_scored_by_the_target(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == PROMPT
    logprobs = answer.choices[0].logprobs.token_logprobs
    assert logprobs[0] is None
    assert all(value < 0 for value in logprobs[1:])
    assert answer.usage.completion_tokens == 0


def test_other_answers(service: RunningService) -> None:
    assert httpx2.get(f"{service.url}/health").status_code == 200
    assert httpx2.get(f"{service.url}/nowhere").json()["error"]["type"]
    assert httpx2.post(f"{service.url}/v1/models").status_code == 405
    malformed = httpx2.post(f"{service.url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert malformed.status_code == 400
    assert json.loads(malformed.text)["error"]["message"]


def test_an_answer_may_be_larger_than_grpc_allows_by_default(service: RunningService, model: str) -> None:
    body = {"model": model, "prompt": "x = [1, 2, 3]\n" * 60_000, "return_token_strs": True}
    answer = httpx2.post(f"{service.url}/tokenize", json=body, timeout=60)
    assert len(answer.content) > 4 << 20
    assert "".join(answer.json()["token_strs"]) == body["prompt"]


def test_counters_count_what_clients_got(service: RunningService, client: OpenAI, model: str) -> None:
    def total(name: str) -> float:
        return sum(value for key, value in service.metrics().items() if key.startswith(f"specdec_{name}_total"))

    names = ("generation_tokens", "prompt_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_drafts")
    before = {name: total(name) for name in names}
    usage = client.completions.create(model=model, prompt=PROMPT, max_tokens=30, temperature=0).usage
    grown = {name: total(name) - before[name] for name in names}
    assert grown["generation_tokens"] == usage.completion_tokens == 30
    assert grown["prompt_tokens"] == usage.prompt_tokens
    assert grown["spec_decode_num_draft_tokens"] >= grown["spec_decode_num_drafts"] > 0
