"""``receipt: true``: what the envelope holds, whole and streamed, and where none is given."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from deployments.http.app import create_app
from deployments.http.service import ApiSettings, ModelInfo, SequenceRequest
from specdec.core.types import Adapter
from specdec.protocol.ingress import TokenDelta
from specdec.receipts.contract import contract_text, numeric_contract
from specdec.receipts.format import LOGPROB_STRIDE, opened
from specdec.receipts.issue import ReceiptIssuer
from specdec.receipts.signing import SigningKey, read_public_key
from specdec.sampling.noise import derive_seed

from .conftest import Bench
from .engine_service import EngineService

BODY = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 20, "seed": 3, "receipt": True}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "receipt": True}


CONTRACT = numeric_contract("float32", "cpu")


class StreamedEngine(EngineService):
    """Gives each sequence as its rounds give it, with all notes; its target names its contract."""

    def __init__(self) -> None:
        super().__init__()
        self._engine._service.target.numeric = contract_text(CONTRACT)

    def model_info(self) -> ModelInfo:
        info = super().model_info()
        return replace(info, target=replace(info.target, weights="sha256:w"))

    async def open(self, request: SequenceRequest) -> AsyncGenerator[TokenDelta]:
        service = self._engine._service
        service.start(request.seq, request.prompt, request.spec)
        finish = None
        while finish is None:
            for delta in service.pump():
                if delta.seq == request.seq:
                    finish = delta.finish
                    yield delta


@pytest.fixture(scope="module")
def engine() -> StreamedEngine:
    return StreamedEngine()


@pytest.fixture(scope="module")
def issuer() -> ReceiptIssuer:
    key = SigningKey(Ed25519PrivateKey.generate())
    return ReceiptIssuer(key, "sha256:w", "sha256:t", "sha256:c")


@pytest.fixture
def app(engine: StreamedEngine, issuer: ReceiptIssuer, tokenizer: PreTrainedTokenizerFast) -> FastAPI:
    settings = ApiSettings(receipts=issuer, trust_request_chat_template=True)
    return create_app(engine, settings, tokenizer)


@pytest.fixture
def ask(app: FastAPI) -> Callable[..., Any]:
    async def send(path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return send


async def test_it_holds_the_request_after_defaults_and_every_choice(ask: Any, issuer: ReceiptIssuer) -> None:
    body = BODY | {"prompt": ["def add(a, b):", [5, 6, 7]], "n": 2, "return_token_ids": True, "top_p": 0.9}
    answer = (await ask("/v1/completions", body)).json()
    receipt = opened(answer["receipt"], issuer.key.public).receipt
    assert (receipt.id, receipt.created, receipt.model.name) == (answer["id"], answer["created"], "demo")
    assert (receipt.sampling.top_p, receipt.sampling.temperature) == (0.9, 1)
    assert (receipt.sampling.logprobs, receipt.seed, receipt.contract) == (None, 3, CONTRACT)
    assert receipt.prompts[1] == (5, 6, 7)
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    for number, (said, shown) in enumerate(zip(receipt.choices, answer["choices"], strict=True)):
        assert (said.prompt, said.seed) == (number // 2, derive_seed(3, number // 2, number % 2))
        assert list(said.token_ids) == shown["token_ids"]
        assert (said.finish_reason, said.max_tokens) == (shown["finish_reason"], 20)
        assert len(said.logprobs) == -(-len(said.token_ids) // LOGPROB_STRIDE)
        assert list(receipt.prompts[said.prompt]) == shown["prompt_token_ids"]


async def test_log_probabilities_are_those_that_the_answer_shows(ask: Any) -> None:
    answer = (await ask("/v1/completions", BODY | {"logprobs": 1})).json()
    shown = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert opened(answer["receipt"]).receipt.choices[0].logprobs == tuple(shown[::LOGPROB_STRIDE])


async def test_a_stream_has_it_in_its_last_chunk_and_whole_answers_say_the_same(ask: Any) -> None:
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT | {"seed": 3})):
        whole = (await ask(path, body)).json()
        streamed = (await ask(path, body | {"stream": True})).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert ["receipt" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        first, second = (opened(one["receipt"]).receipt for one in (whole, chunks[-1]))
        assert first.prompts == second.prompts
        assert first.choices == second.choices


async def test_a_stop_string_ends_the_tokens_where_it_ends_the_answer(ask: Any) -> None:
    body = BODY | {"prompt": "def read_lines(path):\n    with open", "stop": " as", "temperature": 0}
    answer = (await ask("/v1/completions", body | {"return_token_ids": True})).json()
    receipt = opened(answer["receipt"]).receipt
    assert (receipt.choices[0].finish_reason, receipt.stop) == ("stop", (" as",))
    assert list(receipt.choices[0].token_ids) == answer["choices"][0]["token_ids"]


async def test_the_template_of_the_request_counts(ask: Any) -> None:
    own = (await ask("/v1/chat/completions", CHAT)).json()["receipt"]
    other = (await ask("/v1/chat/completions", CHAT | {"chat_template": "hello"})).json()["receipt"]
    assert opened(own).receipt.model.chat_template == "sha256:c"
    assert len(opened(other).receipt.model.chat_template) == 64


async def test_the_log_has_its_hash_and_nothing_of_it(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ray.serve"):
        answer = (await ask("/v1/completions", BODY | {"request_id": "mine"})).json()
    lines = [record.getMessage() for record in caplog.records if "receipt" in record.getMessage()]
    assert lines == [f"receipt request_id=mine sha256={opened(answer['receipt']).sha256}"]


async def test_the_public_key_can_be_had(ask: Any, issuer: ReceiptIssuer) -> None:
    answer = (await ask("/v1/receipts/key")).json()
    assert answer["keyid"] == read_public_key(answer["public_key"]).keyid == issuer.key.keyid


async def test_where_none_can_be_given_the_request_is_refused(
    bench: Bench, refused: Any, issuer: ReceiptIssuer
) -> None:
    assert (await refused("/v1/completions", BODY))["code"] == "unsupported_parameter"
    with_key = Bench(bench.tokenizer, ApiSettings(receipts=issuer))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=with_key.app), base_url="http://api") as client:
        for change in (
            {"model": "demo-draft"},
            {"echo": True, "max_tokens": 0, "logprobs": 0},
        ):
            answer = await client.post("/v1/completions", json=BODY | change)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "receipt"), change
        answer = await client.post("/v1/responses", json={"model": "demo", "input": "Hi", "receipt": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "receipt")


async def test_without_a_key_there_is_no_public_key(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/v1/receipts/key")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "receipts_not_configured")


async def test_answers_name_the_version_of_the_weights(ask: Any, engine: StreamedEngine) -> None:
    plain = {key: value for key, value in BODY.items() if key != "receipt"}
    assert (await ask("/v1/completions", plain)).json()["weights_version"] == "sha256:w"
    adapted = replace(engine.model_info().target, adapter=Adapter("a", "somewhere", "1234"))
    assert adapted.weights_version == "sha256:w+1234"
