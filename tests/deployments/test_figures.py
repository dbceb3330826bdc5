"""Readiness, and the metrics page, from what replicas answer, or fail to answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deployments.figures import PATIENCE_S, Asked, IngressFigures, missing_parts, page
from deployments.metrics import Reports
from deployments.openai.observer import Observer

READY = IngressFigures("I#1", "m", "", b"", {"num_resubmitted": 2.0, "num_dropped_messages": 5.0, "is_draining": 0.0})
ROUTER: Reports = {"R#1": ("router", {}), "T#1": ("target", {"num_sequences": 0.0})}


class Handle:
    """Stands for a deployment's handle: gives what its replicas answer, exceptions among it, or hangs."""

    def __init__(self, *answers: Any) -> None:
        self.answers: list[Any] = list(answers)
        self.hangs = False
        self.num_asked = 0

    def broadcast(self, method: str) -> Handle:
        return self

    async def results_async(self, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        self.num_asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        return self.answers


def asked(handle: Handle, fresh_s: float = 0.0) -> Asked:
    return Asked(lambda: handle, "figures", fresh_s)


def counted(replica: str, num_tokens: int) -> IngressFigures:
    registry = CollectorRegistry()
    observer = Observer(registry)
    observer.opened("m", 0.0).tokens(num_tokens, 0, [])
    return IngressFigures(replica, "m", "", generate_latest(registry), {})


def samples(text: bytes, name: str) -> dict[str, float]:
    return {
        sample.labels.get("worker", sample.labels.get("role", "")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    }


@pytest.mark.parametrize(
    ("ingresses", "routers", "missing"),
    [
        ([READY], [ROUTER], set()),
        ([READY._replace(refusal="draining"), READY], [{"R#2": ("router", {})}, ROUTER], set()),
        ([], [ROUTER], {"ingress"}),
        ([READY._replace(refusal="draining")], [ROUTER], {"ingress"}),
        ([READY], [], {"router", "target"}),
        ([READY], [{"R#1": ("router", {}), "D#1": ("drafter", {})}], {"target"}),
        ([READY], [{"T#1": ("target", {"is_draining": 1.0})}], {"target"}),
    ],
)
def test_ready_is_an_ingress_that_takes_requests_a_router_and_a_target(
    ingresses: list[IngressFigures], routers: list[Reports], missing: set[str]
) -> None:
    assert set(missing_parts(ingresses, routers)) == missing


async def test_a_replica_that_fails_costs_no_other_ones_figures() -> None:
    ingress = Handle(counted("I#1", 3), RuntimeError("gone"), counted("I#2", 4))
    text = await page(asked(ingress), asked(Handle(ROUTER, RuntimeError("gone"))))
    assert samples(text, "specdec_generation_tokens_total") == {"I#1": 3.0, "I#2": 4.0}
    assert samples(text, "specdec_num_sequences") == {"T#1": 0.0}
    assert samples(text, "specdec_scrape_failures_total") == {"ingress": 1.0, "router": 1.0}
    assert text.count(b"# TYPE specdec_generation_tokens_total counter") == 1


async def test_what_machines_of_ingresses_and_routers_count_is_on_the_page() -> None:
    counted: Reports = {
        "R#1": ("router", {"num_reopened": 3.0, "num_dropped_messages": 4.0, "num_resyncs/unknown": 1.0})
    }
    text = await page(asked(Handle(READY)), asked(Handle(counted)))
    assert samples(text, "specdec_num_resubmitted_total") == {"I#1": 2.0}
    assert samples(text, "specdec_num_dropped_messages_total") == {"I#1": 5.0, "R#1": 4.0}
    assert samples(text, "specdec_num_reopened_total") == {"R#1": 3.0}
    assert samples(text, "specdec_is_draining") == {"I#1": 0.0}
    assert b'specdec_num_resyncs_total{model_name="m",reason="unknown",role="router",worker="R#1"} 1.0' in text


async def test_figures_of_before_hold_while_a_replica_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.figures.PATIENCE_S", PATIENCE_S / 100)
    handle = Handle(counted("I#1", 3))
    ingresses = asked(handle)
    await ingresses.get()
    handle.hangs = True
    text = await page(ingresses, asked(Handle()))
    assert samples(text, "specdec_generation_tokens_total") == {"I#1": 3.0}
    assert samples(text, "specdec_scrape_failures_total")["ingress"] == 1


async def test_figures_that_are_old_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.figures.PATIENCE_S", PATIENCE_S / 100)
    monkeypatch.setattr("deployments.figures.STALE_S", 0.0)
    handle = Handle(READY)
    ingresses = asked(handle)
    assert await ingresses.get() == [READY]
    handle.hangs = True
    assert set(missing_parts(await ingresses.get(), [ROUTER])) == {"ingress"}


async def test_ingresses_and_routers_are_asked_at_once() -> None:
    both = asyncio.Barrier(2)

    class Meeting(Handle):
        async def results_async(self, return_exceptions: bool) -> list[Any]:
            await both.wait()
            return await super().results_async(return_exceptions)

    text = await page(asked(Meeting(counted("I#1", 3))), asked(Meeting(ROUTER)))
    assert samples(text, "specdec_scrape_failures_total") == {"ingress": 0.0, "router": 0.0}


async def test_without_an_application_nothing_answers() -> None:
    def handle() -> Any:
        raise RuntimeError("there is no application")

    assert await Asked(handle, "figures", 0.0).get() == []


async def test_however_many_ask_replicas_are_asked_once() -> None:
    handle = Handle(READY)
    ingresses = asked(handle, 60.0)
    assert await asyncio.gather(*(ingresses.get() for _ in range(20))) == [[READY]] * 20
    assert handle.num_asked == 1


async def test_of_two_routers_reports_of_a_worker_the_newer_counts() -> None:
    """What only grows never seems to fall because another router was asked first; plans are each router's own."""
    old: Reports = {"R#1": ("router", {}), "T#1": ("target", {"num_steps": 5.0, "report_s": 1.0})}
    new: Reports = {"R#2": ("router", {}), "T#1": ("target", {"num_steps": 7.0, "report_s": 2.0})}
    for reports in old, new:
        reports["T#1"][1]["planned_draft_tokens"] = reports["T#1"][1]["num_steps"]
    for order in [old, new], [new, old]:
        text = await page(asked(Handle(READY)), asked(Handle(*order)))
        assert samples(text, "specdec_num_steps_total") == {"T#1": 7.0}
        assert text.count(b"specdec_planned_draft_tokens{") == 2
