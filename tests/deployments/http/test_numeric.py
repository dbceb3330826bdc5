"""A strict answer whose target is lost: on one whose logits have the same hash it goes on, else it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from httpx2 import ASGITransport, AsyncClient, Response
from prometheus_client import CollectorRegistry

from benchmarks.scripted import Script, ScriptedTarget
from deployments.http.app import create_app
from deployments.http.observer import Observer
from deployments.http.service import ApiSettings
from deployments.tokens import RoutedTokens
from deployments.transport.host import LoopHost
from specdec.drafting.plans import no_drafts
from specdec.engine.engine import InProcessService
from specdec.protocol.ingress import NUMERIC_CONTRACT, IngressMachine
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from tests.deployments.http.conftest import Bench

OWN, OTHER = "a hash", "another hash"
TIMES = Times(lease_s=1e6, peer_timeout_s=1e6)
DIES_AFTER = 3


class Line:
    """Drives the machines of a service on the event loop; after a few steps its target is lost, and another comes."""

    failed = False

    def __init__(self, of_next: str, after: Callable[[IngressMachine], None]) -> None:
        self._now_s, self._num_steps, self._after = 0.0, 0, after
        self._backend = ScriptedTarget(Script(0.8, 0.9, range(5, 50)), 128)
        self._service = service = InProcessService(self._backend, None, 0, clock=lambda: self._now_s)
        service.router = RouterMachine("router", no_drafts, TIMES)
        self._joins("target", OWN)
        self._of_next = of_next

    def _joins(self, name: str, numeric: str) -> None:
        self._service.target = TargetMachine(name, self._backend, TIMES, numeric=numeric)
        self._service.router.worker_joined(name, "target", self._now_s)

    def tell(self, action: Callable[[IngressMachine, float], None]) -> None:
        action(self._service.ingress, self._now_s)
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        service = self._service
        self._now_s += 1.0
        self._num_steps += 1
        if self._num_steps == DIES_AFTER:
            service.router.worker_lost("target", self._now_s)
            self._joins("next", self._of_next)
        service.router.step(self._now_s)
        service._exchange()
        service.target.step(self._now_s)
        service._exchange()
        self._after(service.ingress)
        if len(service.ingress):
            asyncio.get_running_loop().call_soon(self._turn)


async def answered(bench: Bench, of_next: str, **changes: Any) -> Response:
    """The answer of a service whose target dies in the middle of it."""
    tokens = RoutedTokens(bench.service.model_info())
    line = Line(of_next, tokens.deliver)
    tokens.connect(cast(LoopHost[IngressMachine], line), lambda: True)
    app = create_app(tokens, ApiSettings(), bench.tokenizer, Observer(CollectorRegistry()))
    asked = {"model": "demo", "prompt": [9, 8], "max_tokens": 12, "ignore_eos": True}
    async with AsyncClient(transport=ASGITransport(app=app), base_url="http://api") as client:
        return await client.post("/v1/completions", json=asked | changes)


@pytest.mark.parametrize(("of_next", "changes"), [(OWN, {}), (OTHER, {"exactness": "fast"})])
async def test_it_goes_on_with_an_equal_hash_or_with_any_if_it_asked_for_fast(
    bench: Bench, of_next: str, changes: dict[str, Any]
) -> None:
    answer = await answered(bench, of_next, **changes)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 12


async def test_it_ends_with_an_error_if_no_other_target_has_its_hash(bench: Bench) -> None:
    answer = await answered(bench, OTHER)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (503, "numeric_contract", NUMERIC_CONTRACT)
    streamed = await answered(bench, OTHER, stream=True)
    assert '"code":"numeric_contract"' in streamed.text.replace(" ", "")
