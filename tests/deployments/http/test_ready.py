from __future__ import annotations

from httpx2 import ASGITransport, AsyncClient
from prometheus_client import CollectorRegistry

from deployments.http.app import create_app
from deployments.http.observer import Observer
from deployments.http.service import ApiSettings
from deployments.operate.readiness import Workers
from deployments.tokens import RoutedTokens
from deployments.transport.host import LoopHost
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import Times

from .conftest import Bench


async def test_an_ingress_is_ready_when_a_router_has_a_target_that_takes_sequences(bench: Bench) -> None:
    routers: list[Workers] = []
    is_linked = True

    async def ask() -> list[Workers]:
        return routers

    tokens = RoutedTokens(bench.service.model_info())
    tokens.connect(LoopHost(IngressMachine("I", Times())), lambda: is_linked, ask)
    app = create_app(tokens, ApiSettings(), bench.tokenizer, Observer(CollectorRegistry()))
    async with AsyncClient(transport=ASGITransport(app=app), base_url="http://api") as client:

        async def told() -> tuple[int, str]:
            answers = [await client.get("/ping"), await client.post("/ping"), await client.get("/health")]
            assert len({(answer.status_code, answer.text) for answer in answers}) == 1
            return answers[0].status_code, answers[0].json()["error"]["message"] if answers[0].content else ""

        assert await told() == (503, "router: no replica answers; target: no router has a link to one")
        routers.append({"D#1": ("drafter", False)})
        assert await told() == (503, "target: no router has a link to one")
        routers.append({"T#1": ("target", True)})
        assert await told() == (503, "target: all of them drain")
        routers.append({"T#2": ("target", False)})
        assert await told() == (200, "")
        is_linked = False
        assert await told() == (503, "ingress: no router can be reached")
        is_linked = True
        tokens.drain()
        status, text = await told()
        assert status == 503
        assert text.startswith("ingress: this ingress drains")
