"""Responses that are kept: conversations that go on from them, for their owner alone, on any ingress."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseItemList
from transformers import PreTrainedTokenizerFast

from cluster.config.limits import ResponsesStore
from deployments.http import writing as writing_module
from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.responses import items as items_module
from deployments.http.routes import responses as responses_module
from deployments.http.service import ApiSettings
from deployments.http.store import MemoryStore, Store
from deployments.http.writing import json_bytes
from specdec.core.errors import ServiceUnavailableError
from specdec.core.types import TokenLogprobs

from ..conftest import Bench
from ..scripted import rounds
from ..stores import FaultyStore
from ..test_tools import BODY as CHAT
from ..test_tools import CALL_A
from .responses_client import ASK, PATH, checked, events

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}


@pytest.fixture
def bench(tokenizer: PreTrainedTokenizerFast) -> Bench:
    return Bench(tokenizer, max_model_len=1024)


def app_of(bench: Bench, store: Store, keys: dict[str, str] | None = None) -> Any:
    """An ingress of the service."""
    settings = ApiSettings(trust_request_chat_template=True)
    return create_app(bench.service, settings, bench.tokenizer, None, ApiKeys(keys or {}), store=store)


@pytest.fixture
async def ingresses(bench: Bench) -> AsyncIterator[list[httpx2.AsyncClient]]:
    """Two, with keys, and one store."""
    store = MemoryStore(ResponsesStore())
    async with AsyncExitStack() as stack:
        apps = [app_of(bench, store, KEYS) for _ in range(2)]
        clients = (httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") for app in apps)
        yield [await stack.enter_async_context(client) for client in clients]


@pytest.fixture
def clients(ingresses: list[httpx2.AsyncClient]) -> Callable[[str, int], AsyncOpenAI]:
    def client(key: str, ingress: int) -> AsyncOpenAI:
        return AsyncOpenAI(api_key=KEYS[key], base_url="http://api/v1", http_client=ingresses[ingress], max_retries=0)

    return client


Clients = Callable[[str, int], AsyncOpenAI]


def prompt_of(bench: Bench) -> str:
    return str(bench.tokenizer.decode(list(bench.service.opened[-1].prompt)))


async def test_a_conversation_goes_on_at_another_ingress(bench: Bench, clients: Clients) -> None:
    """With the output and all input, but without the instructions."""
    bench.says("x = 1")
    first = await clients("alice", 0).responses.create(**ASK, instructions="Be kind.")
    assert first.store
    bench.says("y = 2")
    second = await clients("alice", 1).responses.create(model="demo", input="More.", previous_response_id=first.id)
    assert prompt_of(bench) == "<|endoftext|># Add.\nx = 1\n\n\n# More.\n"
    assert second.previous_response_id == first.id
    third = await clients("alice", 0).responses.create(
        model="demo", input="Last.", previous_response_id=second.id, instructions="Be brief."
    )
    assert prompt_of(bench) == "<|endoftext|># Be brief.\n# Add.\nx = 1\n\n\n# More.\ny = 2\n\n\n# Last.\n"
    assert len({first.id, second.id, third.id}) == 3
    # It branches where it is asked to.
    await clients("alice", 0).responses.create(model="demo", input="Other.", previous_response_id=first.id)
    assert prompt_of(bench) == "<|endoftext|># Add.\nx = 1\n\n\n# Other.\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_there_as_it_was_sent_until_it_is_deleted(
    bench: Bench, clients: Clients, ingresses: list[httpx2.AsyncClient], stream: bool
) -> None:
    bench.says("x = 1", 2)
    here, there = clients("alice", 0), clients("alice", 1)
    if stream:
        async with here.responses.stream(**ASK) as streamed:
            # Whoever hears of its end can ask for it.
            async for event in streamed:
                if event.type == "response.completed":
                    assert (await there.responses.retrieve(event.response.id)).output_text == "x = 1"
            sent = await streamed.get_final_response()
    else:
        sent = await here.responses.create(**ASK)
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    answer = await ingresses[1].get(f"{PATH}/{sent.id}", headers=headers)
    assert stream or checked(answer.json()).to_dict() == sent.to_dict()
    assert (answer.json()["usage"], answer.json()["status"]) == (sent.usage.to_dict(), "completed")
    assert (await there.responses.retrieve(sent.id)).output_text == sent.output_text
    await there.responses.delete(sent.id)
    for ask in (here.responses.retrieve, here.responses.delete, here.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(sent.id)
        assert caught.value.body["code"] == "response_not_found"


async def test_each_key_has_its_own(bench: Bench, clients: Clients) -> None:
    bench.says("x = 1")
    kept = await clients("alice", 0).responses.create(**ASK)
    bob = clients("bob", 0)
    for ask in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await ask(kept.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await bob.responses.create(**ASK, previous_response_id=kept.id)
    assert caught.value.body["code"] == "previous_response_not_found"
    assert caught.value.body["param"] == "previous_response_id"
    assert len(bench.service.opened) == 1
    assert (await clients("alice", 1).responses.retrieve(kept.id)).output_text == "x = 1"


async def test_what_says_so_is_not_kept_and_what_fails_neither(bench: Bench, clients: Clients) -> None:
    bench.says("x = 1")
    client = clients("alice", 0)
    response = await client.responses.create(**ASK, store=False, extra_headers={"x-request-id": "mine"})
    assert (response.id, response.store) == ("resp_mine", False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    # No client names what is kept.
    kept = await client.responses.create(**ASK, extra_headers={"x-request-id": "mine"})
    assert "mine" not in kept.id


async def test_an_answer_that_was_cut_off_is_kept(bench: Bench, clients: Clients) -> None:
    bench.says("x = 1", finish="length")
    kept = await clients("alice", 0).responses.create(**ASK)
    assert (await clients("alice", 1).responses.retrieve(kept.id)).status == "incomplete"


async def test_calls_and_results_go_on(bench: Bench, clients: Clients) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in CHAT["tools"]]
    bench.says(f"I look.\n{CALL_A}")
    first = await clients("alice", 0).responses.create(model="demo", input="What weather?", tools=tools)
    call = first.output[1]
    bench.says("ok")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}
    second = await clients("alice", 1).responses.create(
        model="demo", input=[result], previous_response_id=first.id, tools=tools
    )
    assert prompt_of(bench).endswith(
        f"# What weather?\nI look.\n\n\n{CALL_A}\n# <tool_response>\n# Sun.\n# </tool_response>\n".replace("  ", " ")
    )
    page = await clients("alice", 0).responses.input_items.list(second.id, order="asc")
    kinds = [item.type for item in page.data]
    assert kinds == ["message", "message", "function_call", "function_call_output"]


async def test_the_items_of_its_input_page_by_page(
    bench: Bench, clients: Clients, ingresses: list[httpx2.AsyncClient]
) -> None:
    bench.says("ok")
    items: Any = [{"role": "assistant" if i % 2 else "user", "content": f"{i}"} for i in range(7)]
    kept = await clients("alice", 0).responses.create(model="demo", input=items)
    client = clients("alice", 1)
    for order, wanted in (("asc", "0123456"), ("desc", "6543210")):
        found = [item async for item in client.responses.input_items.list(kept.id, limit=3, order=order)]
        assert "".join(item.content[0].text for item in found) == wanted
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    answer = (await ingresses[0].get(f"{PATH}/{kept.id}/input_items?limit=3", headers=headers)).json()
    ResponseItemList.model_validate(answer)
    assert (answer["has_more"], len(answer["data"]), answer["last_id"]) == (True, 3, answer["data"][-1]["id"])
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=none", "after")):
        answer = await ingresses[0].get(f"{PATH}/{kept.id}/input_items?{query}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = await ingresses[0].get(f"{PATH}/{kept.id}?stream=true", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    answer = await ingresses[0].get(f"{PATH}/{kept.id}?include[]=everything", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include[][0]")


async def test_without_keys_whoever_sends_the_same_is_the_same(bench: Bench) -> None:
    bench.says("ok")
    app = app_of(bench, MemoryStore(ResponsesStore()))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as http:
        name = (await http.post(PATH, json=ASK)).json()["id"]
        assert (await http.get(f"{PATH}/{name}")).status_code == 200
        assert (await http.get(f"{PATH}/{name}", headers={"Authorization": "Bearer x"})).status_code == 404


GONE = "the response is not stored: the store does not answer"
TOO_LARGE = "the response is not stored: it is larger than responses_store.max_bytes"


@pytest.mark.parametrize(
    ("fault", "max_bytes", "warning"),
    [(ServiceUnavailableError("gone"), 1 << 20, GONE), (None, 1024, TOO_LARGE)],
    ids=["gone", "too large"],
)
async def test_an_answer_that_cannot_be_stored_goes_out_and_says_so(
    bench: Bench, fault: Exception | None, max_bytes: int, warning: str
) -> None:
    """Its tokens were generated and are billed: no error makes a client generate them again."""
    bench.says("x = 1")
    store = FaultyStore(MemoryStore(ResponsesStore(max_bytes=max_bytes)))
    store.fault = fault
    transport = httpx2.ASGITransport(app=app_of(bench, store))
    ask = ASK | {"metadata": {"a": "x" * 500}, "instructions": "x " * 200}
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as http:
        answer = await http.post(PATH, json=ask)
        assert (answer.status_code, answer.headers["x-specdec-warning"]) == (200, warning)
        whole = answer.json()
        assert (whole["store"], whole["warning"], whole["status"]) == (False, warning, "completed")
        assert whole["output"][0]["content"][0]["text"] == "x = 1"
        found = await events(http, **ask)
        assert [event["type"] for event in found[-2:]] == ["response.output_item.done", "response.completed"]
        last = found[-1]["response"]
        assert (last["store"], last["warning"]) == (False, warning)
        assert len(bench.service.opened) == 2
        kept_out = await http.post(PATH, json=ask | {"store": False})
        assert kept_out.status_code == 200
        assert "x-specdec-warning" not in kept_out.headers
        assert "warning" not in kept_out.json()


async def test_a_conversation_whose_store_is_gone_is_refused_before_anything_is_generated(bench: Bench) -> None:
    store = FaultyStore(MemoryStore(ResponsesStore()))
    store.fault = ServiceUnavailableError("gone")
    transport = httpx2.ASGITransport(app=app_of(bench, store))
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as http:
        for answer in (
            await http.post(PATH, json=ASK | {"previous_response_id": "resp_1"}),
            await http.get(f"{PATH}/resp_1"),
            await http.delete(f"{PATH}/resp_1"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
    assert bench.service.opened == []


async def test_log_probabilities_stay_with_their_response(bench: Bench, clients: Clients) -> None:
    """A stored conversation does not carry those of each turn into every later one."""
    entry = TokenLogprobs(-0.5, 1)
    tokens = bench.tokenizer.encode("x = 1")
    bench.script = lambda request: rounds([*tokens, 0], logprobs=[entry] * (len(tokens) + 1))
    include: Any = ["message.output_text.logprobs"]
    first = await clients("alice", 0).responses.create(**ASK, include=include)
    kept = await clients("alice", 1).responses.retrieve(first.id, include=include)
    assert kept.output[0].content[0].logprobs
    second = await clients("alice", 0).responses.create(model="demo", input="More.", previous_response_id=first.id)
    page = await clients("alice", 0).responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in page.data] == [ASK["input"], "x = 1", "More."]
    assert not page.data[1].content[0].logprobs


async def test_nothing_long_is_written_or_read_on_the_event_loop(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream's end repeats all its log probabilities; its beginning, and a later turn, what it was asked for."""
    bench = Bench(tokenizer, max_model_len=8192)
    here, on_loop, beside = threading.get_ident(), [0], [0]

    def noted(text: Any) -> Any:
        (on_loop if threading.get_ident() == here else beside).append(len(text))
        return text

    dumps, read = writing_module._dumps, SimpleNamespace(loads=lambda text: json.loads(noted(text)))
    monkeypatch.setattr(writing_module, "_dumps", lambda value: noted(dumps(value)))
    for module in (writing_module, items_module):
        monkeypatch.setattr(module, "json_bytes", lambda value: noted(json_bytes(value)))
    for module in (items_module, responses_module):
        monkeypatch.setattr(module, "json", read)
    entry = TokenLogprobs(-0.5, 1, ((1, -0.5),) * 20)
    tokens = bench.tokenizer.encode("x = 1\n" * 100)
    bench.script = lambda request: rounds([*tokens, 0], logprobs=[entry] * (len(tokens) + 1))
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "stream": True}
    transport = httpx2.ASGITransport(app=app_of(bench, MemoryStore(ResponsesStore())))
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as http:
        answer = await http.post(PATH, json=ASK | {"instructions": "Be short. " * 1000} | asked)
        name = re.findall(r"resp_\w+", answer.text)[-1]
        bench.says("x")
        second = await http.post(PATH, json=ASK | {"previous_response_id": name, "input": "More. " * 1000})
        assert (await http.get(f"{PATH}/{second.json()['id']}/input_items")).status_code == 200
    assert max(beside) > 100_000
    assert max(on_loop) < 5_000


async def test_without_a_store_there_is_nothing(bench: Bench, http: httpx2.AsyncClient) -> None:
    for answer in (
        await http.get(f"{PATH}/resp_1"),
        await http.delete(f"{PATH}/resp_1"),
        await http.get(f"{PATH}/resp_1/input_items"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


async def test_what_the_model_should_not_have_called_is_not_gone_on_with(bench: Bench, clients: Clients) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in CHAT["tools"]]
    call = f'<tool_call>{{"arguments": {{}}, "name": "{"f" * 257}"}}</tool_call>'
    for said, reason in ((call, "at most 256 characters"), (CALL_A * 129, "at most 128 calls in a row")):
        bench.says(said)
        first = await clients("alice", 0).responses.create(**ASK, tools=tools)
        assert {item.type for item in first.output} == {"function_call"}
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            await clients("alice", 0).responses.create(model="demo", input="x", previous_response_id=first.id)
        assert caught.value.body["param"] == "previous_response_id"
