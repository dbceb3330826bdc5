"""Fields of vLLM's that change how prompts are made, how tokens are chosen, and how answers are written."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from msgspec import structs
from transformers import PreTrainedTokenizerFast

from deployments.http.service import SequenceRequest
from specdec.core.tokens import SharedTokens
from specdec.core.types import TokenLogprobs
from specdec.text.prompts import encode_bad_words
from tests.deployments.http.scripted import rounds

from .conftest import MAX_MODEL_LEN, TEXT, Bench

COMPLETION = {"model": "demo", "prompt": "def add"}
MESSAGES = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "def ad"}]
CHAT = {"model": "demo", "messages": MESSAGES}
EOT = "<|endoftext|>"


async def sent(bench: Bench, http: httpx2.AsyncClient, body: dict[str, Any], **fields: Any) -> SequenceRequest:
    """The sequence that a body leads to."""
    bench.says("ok")
    answer = await http.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    return bench.service.opened[-1]


async def text_of(http: httpx2.AsyncClient, **fields: Any) -> str:
    answer = await http.post("/v1/completions", json=COMPLETION | fields)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def test_bans_reach_the_sequence_as_tokens(bench: Bench, http: httpx2.AsyncClient) -> None:
    request = await sent(bench, http, COMPLETION, allowed_token_ids=[5, 6], bad_words=["return", "add (a"])
    assert request.spec.sampling.allowed_token_ids == SharedTokens((5, 6))
    await sent(bench, http, COMPLETION, allowed_token_ids=[5, 6], n=3)
    assert len({id(one.spec.sampling.allowed_token_ids) for one in bench.service.opened[-3:]}) == 1, "it travels once"
    words = request.spec.sampling.bad_words
    assert words == encode_bad_words(bench.tokenizer, ["return", "add (a"])
    texts = [bench.tokenizer.decode(word) for word in words]
    assert {"return", "add (a"} <= set(texts) <= {"return", " return", "add (a", " add (a"}


async def test_prompts_are_truncated_to_their_end(bench: Bench, http: httpx2.AsyncClient) -> None:
    ids = bench.tokenizer.encode(TEXT)
    for prompt in (TEXT, ids):
        assert (await sent(bench, http, COMPLETION, prompt=prompt, truncate_prompt_tokens=3)).prompt == SharedTokens(
            ids[-3:]
        )
        kept = await sent(bench, http, COMPLETION, prompt=prompt, truncate_prompt_tokens=10**6)
        assert kept.prompt == SharedTokens(ids)
    long = [5] * 1000
    fitting = await sent(bench, http, COMPLETION, prompt=long, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(fitting.prompt) == MAX_MODEL_LEN - 10
    chat = await sent(bench, http, CHAT, truncate_prompt_tokens=2)
    assert len(chat.prompt) == 2
    bench.says("ok")
    echo = await text_of(http, prompt=TEXT, truncate_prompt_tokens=3, echo=True)
    assert echo == bench.tokenizer.decode(ids[-3:]) + "ok"


async def test_the_end_of_a_conversation(bench: Bench, http: httpx2.AsyncClient) -> None:
    async def prompt(**fields: Any) -> str:
        tokens = list((await sent(bench, http, CHAT, **fields)).prompt)
        answer = await http.post("/tokenize", json={"messages": MESSAGES, **fields})
        assert answer.json()["tokens"] == tokens
        return str(bench.tokenizer.decode(tokens))

    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    with_template = {"chat_template": template}
    assert await prompt(**with_template) == "[user]Add.[assistant]def ad>"
    assert await prompt(**with_template, add_generation_prompt=True) == "[user]Add.[assistant]def ad>"
    assert await prompt(**with_template, add_generation_prompt=False) == "[user]Add.[assistant]def ad"
    assert (await prompt(continue_final_message=True)).endswith("def ad")
    answer = await http.post(
        "/v1/chat/completions", json=CHAT | {"add_generation_prompt": True, "continue_final_message": True}
    )
    assert answer.json()["error"]["param"] == "continue_final_message"


async def test_special_tokens_of_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    class Adding:
        """A tokenizer that puts one before every text, unless told not to."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0] * add_special_tokens + tokenizer.encode(text, add_special_tokens=False)

    bench = Bench(Adding())  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        plain = await sent(bench, http, COMPLETION, add_special_tokens=False)
        for fields in ({}, {"add_special_tokens": True}):
            assert tuple((await sent(bench, http, COMPLETION, **fields)).prompt) == (0, *plain.prompt)
        chat = await sent(bench, http, CHAT, add_special_tokens=False)
        assert (await sent(bench, http, CHAT)).prompt == chat.prompt
        assert tuple((await sent(bench, http, CHAT, add_special_tokens=True)).prompt) == (0, *chat.prompt)


async def test_special_tokens_of_the_text(bench: Bench, http: httpx2.AsyncClient) -> None:
    ids = [*bench.tokenizer.encode("a"), 0, *bench.tokenizer.encode("b"), 0]
    bench.script = lambda request: rounds(ids, 2)
    for fields, text in (
        ({}, "ab"),
        ({"skip_special_tokens": True, "spaces_between_special_tokens": False}, "ab"),
        ({"skip_special_tokens": False}, f"a{EOT}b"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, f"a{EOT}b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, f"a{EOT}b{EOT}"),
    ):
        assert await text_of(http, ignore_eos=False, **fields) == text


async def test_a_tokenizer_that_writes_spaces_between_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    class Spaced:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, tokens: list[int], **options: Any) -> str:
            return " ".join(tokenizer.decode([token], **options) for token in tokens)

    bench = Bench(Spaced())  # type: ignore[arg-type]
    asked = {"spaces_between_special_tokens": False}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        assert (await http.post("/v1/completions", json=COMPLETION | asked)).status_code == 200
        answer = await http.post("/v1/completions", json=COMPLETION | asked | {"skip_special_tokens": False})
        assert answer.json()["error"]["param"] == "spaces_between_special_tokens"


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_a_stop_string_in_the_output(bench: Bench, http: httpx2.AsyncClient, size: int) -> None:
    bench.says(TEXT, size)
    assert await text_of(http, stop="return") == TEXT[: TEXT.index("return")]
    included = await text_of(http, stop="return", include_stop_str_in_output=True)
    assert included == TEXT[: TEXT.index("return") + len("return")]


async def test_tokens_as_ids(bench: Bench, http: httpx2.AsyncClient) -> None:
    ids = [*bench.tokenizer.encode("ok"), 0]
    entries = [TokenLogprobs(-0.5, 1, ((token, -0.5), (7, -2.0))) for token in ids]
    bench.script = lambda request: rounds(ids, logprobs=entries)
    body = COMPLETION | {"logprobs": 2, "return_tokens_as_token_ids": True}
    told = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{token}" for token in ids]
    assert told["top_logprobs"][0] == {f"token_id:{ids[0]}": -0.5, "token_id:7": -2.0}
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    content = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in ids]
    assert bytes(content[0]["bytes"]) == bench.tokenizer.decode(ids[:1]).encode()


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_the_usage_of_every_chunk(
    bench: Bench, http: httpx2.AsyncClient, body: dict[str, Any], include_usage: bool
) -> None:
    bench.says(TEXT, 3)
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = await http.post(path, json=body | {"stream": True, "stream_options": options, "n": 2})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * (len(bench.tokenizer.encode(TEXT)) + 1)
    assert len(set(counts)) > 4
    prompt = len(bench.service.opened[-1].prompt)
    for chunk in chunks:
        usage = chunk["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (prompt, prompt + usage["completion_tokens"])
    assert (chunks[-1]["choices"] == []) == include_usage


async def test_tokens_that_were_not_read_are_told_once_for_each_prompt(bench: Bench, http: httpx2.AsyncClient) -> None:
    ids = bench.tokenizer.encode(TEXT)
    bench.script = lambda request: [
        replace(delta, notes=structs.replace(delta.notes, num_cached_tokens=0 if i else 5))
        for i, delta in enumerate(rounds(ids, 4))
    ]
    body = COMPLETION | {"prompt": ["def add", "def sub"], "n": 3}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10}
    stream = await http.post("/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}})
    *_, last = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
    assert last["usage"] == usage


async def test_ids_and_fingerprints(bench: Bench, http: httpx2.AsyncClient, tokenizer: PreTrainedTokenizerFast) -> None:
    bench.says("ok")
    answer = (await http.post("/v1/completions", json=COMPLETION | {"request_id": "mine-7"})).json()
    assert answer["id"] == "cmpl-mine-7"
    stream = await http.post("/v1/chat/completions", json=CHAT | {"request_id": "mine-8", "stream": True})
    chunks = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-mine-8"}
    assert {chunk["system_fingerprint"] for chunk in chunks} == {answer["system_fingerprint"]}
    assert answer["system_fingerprint"].startswith("fp_")
    target = bench.service.model_info().target
    assert answer["system_fingerprint"] == target.fingerprint
    assert target.fingerprint == Bench(tokenizer).service.model_info().target.fingerprint
    assert dataclasses.replace(target, decision="another").fingerprint != target.fingerprint


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize(("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])
async def test_an_invocation_is_what_its_body_says(
    bench: Bench, http: httpx2.AsyncClient, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    bench.says("ok")
    own, invoked = [await http.post(to, json=body | fields) for to in (f"/v1/{path}", "/invocations")]
    assert (own.status_code, invoked.status_code) == (200, 200)
    assert invoked.headers["content-type"] == own.headers["content-type"]
    first, other = bench.service.opened
    assert first.prompt == other.prompt
    own, invoked = [await http.post(to, json=body | {"n": "many"}) for to in (f"/v1/{path}", "/invocations")]
    assert (invoked.status_code, invoked.json()) == (400, own.json())
    assert (await http.post("/invocations", content="[1")).status_code == 400
    assert (await http.post("/invocations", json=[])).status_code == 400


async def test_no_path_of_the_machine_is_told(bench: Bench, http: httpx2.AsyncClient) -> None:
    info = bench.service.model_info()
    target = dataclasses.replace(info.target, root="/srv/models/big")
    bench.service._info = dataclasses.replace(info, target=target)
    listed = (await http.get("/v1/models")).json()["data"]
    assert [model["root"] for model in listed if model["id"] == "demo"] == ["big"]
    for path in ("/", "/v1/models", "/v1/models/demo"):
        assert "/srv" not in (await http.get(path)).text


async def test_pages_for_people_and_probes(bench: Bench, http: httpx2.AsyncClient) -> None:
    root = (await http.get("/")).json()
    assert root["models"] == ["demo"]
    assert (await http.get("/version")).json() == {"version": root["version"]}
    for method in ("GET", "POST"):
        assert (await http.request(method, "/ping")).status_code == 200
    page = await http.get(root["docs"])
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "openapi.json" in page.text
