from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specdec.demo
from cluster.config.limits import Limits
from deployments.http.app import create_app
from deployments.http.observer import Observer
from deployments.http.service import ApiSettings, ModelInfo, SequenceRequest, ServedModel
from specdec.core.params import GenerationDefaults
from specdec.protocol.ingress import TokenDelta
from tests.deployments.http.scripted import ScriptedService, Step, rounds

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 128
TEXT = "def add(a, b):\n    return a + b  # 🙂\n\n\ndef sub(a, b):\n    return a - b\n"


class KeepingService(ScriptedService):
    """Holds on to what it has opened, so that only a real close ends it, not the garbage collector."""

    def open(self, request: SequenceRequest) -> AsyncGenerator[TokenDelta]:
        self.kept = [*getattr(self, "kept", []), super().open(request)]
        return self.kept[-1]


def limits(num_sequences: int = 256, num_waiting: int = 256, **others: object) -> Limits:
    """Limits smaller than a configuration may have them."""
    return Limits.model_construct(max_concurrent_requests=num_sequences, max_queued_requests=num_waiting, **others)


@dataclass
class Bench:
    """An API over a script that can be changed, and what it takes to talk to it."""

    tokenizer: PreTrainedTokenizerFast
    settings: ApiSettings = field(
        default_factory=lambda: ApiSettings(Limits(priorities="own"), trust_request_chat_template=True)
    )
    script: Callable[[SequenceRequest], Iterable[Step]] = lambda request: [TokenDelta(finish="length")]
    defaults: GenerationDefaults = GenerationDefaults(top_p=0.9, repetition_penalty=1.1)  # noqa: RUF009 - it is frozen
    max_model_len: int = MAX_MODEL_LEN
    eos_token_ids: tuple[int, ...] = (0,)
    weights: str = ""

    def __post_init__(self) -> None:
        of_target = (self.max_model_len, VOCAB_SIZE, self.eos_token_ids, self.defaults)
        target = ServedModel("demo", *of_target, weights=self.weights)
        info = ModelInfo(target, 4, created_s=7)
        self.registry = CollectorRegistry()
        self.service = KeepingService(info, lambda request: self.script(request))
        self.observer = Observer(self.registry, "demo")
        self.app = create_app(self.service, self.settings, self.tokenizer, self.observer)

    def say(self, text: str, size: int = 1, finish: str = "stop") -> list[Step]:
        """The steps that say a text, and end with the model's end where that is why they end."""
        ids = self.tokenizer.encode(text)
        return rounds([*ids, 0] if finish == "stop" else ids, size, finish)

    def says(self, text: str, size: int = 1, finish: str = "stop") -> None:
        """From now on every sequence says this."""
        self.script = lambda request: self.say(text, size, finish)

    def metric(self, name: str, **labels: str) -> float:
        wanted = {"model_name": "demo", **labels}.items()
        samples = [sample for metric in self.registry.collect() for sample in metric.samples]
        return sum(one.value for one in samples if one.name == f"specdec_{name}" and wanted <= one.labels.items())


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(f"{specdec.demo.__path__[0]}/target")


@pytest.fixture
def bench(tokenizer: PreTrainedTokenizerFast) -> Bench:
    return Bench(tokenizer)


@pytest.fixture
async def http(bench: Bench) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=bench.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
        yield client


@pytest.fixture
def client(http: httpx2.AsyncClient) -> Iterator[AsyncOpenAI]:
    return AsyncOpenAI(api_key="none", base_url="http://api/v1", http_client=http, max_retries=0)


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """A real server for an app; its URL."""
    options = {"port": 0, "log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", **options))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture
async def url(bench: Bench) -> AsyncIterator[str]:
    async with listening(bench.app) as url:
        yield url


@pytest.fixture
async def live(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture
def refused(http: httpx2.AsyncClient) -> Callable[..., Any]:
    """Send a body and return the error that comes back, after checking its form."""

    async def send(path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
        answer = await http.post(path, json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    return send


def accepts(bench: Bench, text: str) -> bool:
    """Whether the last sequence's grammar allows a text, up to its end."""
    grammar = bench.service.opened[-1].spec.sampling.grammar
    if grammar is None:
        return True
    matcher = bench.app.state.api.grammars.compiled(grammar, (0,)).result().deep_copy()
    tokens = bench.tokenizer.encode(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
