"""The router's plan, on its way to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from httpx2 import ASGITransport, AsyncClient
from prometheus_client import CollectorRegistry

from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget
from deployments.http.app import create_app
from deployments.http.observer import Observer
from deployments.http.service import ApiSettings
from deployments.tokens import RoutedTokens
from deployments.transport.host import LoopHost
from specdec.core.messages import Plan
from specdec.protocol.ingress import IngressMachine
from tests.deployments.http.conftest import Bench
from tests.specdec.engine.overlap import OverlapService


class Line:
    """Stands for the host of an ingress: drives all machines on the event loop while a request is open."""

    failed = False

    def __init__(self, service: OverlapService, after: Callable[[IngressMachine], None]) -> None:
        self._service, self._after = service, after

    def tell(self, action: Callable[[IngressMachine, float], None]) -> None:
        action(self._service.ingress, 0.0)
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._service.target.step(0.0)
        self._service.drafter.step(0.0)
        self._service._exchange()
        self._after(self._service.ingress)
        if len(self._service.ingress):
            asyncio.get_running_loop().call_soon(self._turn)


async def plan_in_answer(bench: Bench, plan: Plan) -> Any:
    """The plan in the answer of a service whose router has this one for every sequence."""
    script = Script(0.8, 0.9, range(5, 50))
    service = OverlapService(ScriptedTarget(script, 128), ScriptedDrafter(script, 128), plan, lambda: 0)
    tokens = RoutedTokens(bench.service.model_info())
    tokens.connect(cast(LoopHost[IngressMachine], Line(service, tokens.deliver)), lambda: True)
    app = create_app(tokens, ApiSettings(), bench.tokenizer, Observer(CollectorRegistry()))
    asked = {"model": "demo", "prompt": [9, 8], "max_tokens": 12, "per_request_spec_decode_metrics": "summary"}
    async with AsyncClient(transport=ASGITransport(app=app), base_url="http://api") as client:
        answer = await client.post("/v1/completions", json=asked | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["metrics"]["speculative_decoding"]["plan"]


@pytest.mark.parametrize(
    ("plan", "mode"),
    [
        (Plan(), "off"),
        (Plan(3, acceptance_rate=0.75, mode="sequential", draft_wait_s=1.0), "sequential"),
        (Plan(3, acceptance_rate=0.75), "overlap"),
        (Plan(3, 8, acceptance_rate=0.75, draft_wait_s=0.25), "outcomes"),
    ],
)
async def test_an_answer_tells_the_plan_of_its_router(bench: Bench, plan: Plan, mode: str) -> None:
    assert await plan_in_answer(bench, plan) == {
        "num_draft_tokens": plan.num_draft_tokens,
        "num_branches": plan.num_branches,
        "mode": mode,
        "acceptance_rate": plan.acceptance_rate,
        "draft_wait_s": plan.draft_wait_s,
    }
