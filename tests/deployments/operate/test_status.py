"""What ``/health`` says of a service that loads: the launcher's words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.requests import Request

from deployments.operate import status
from deployments.operate.readiness import ReplicaPoll
from deployments.operate.status import Health, StatusArgs

LOADS = {"TargetServer": "loading x: 3.1 of 7.5 GB", "DraftServer": "timing its steps"}


@pytest.fixture(autouse=True)
def _no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve is not there to be asked; asking it would start a Ray."""

    async def none(_: Any) -> None:
        return None

    monkeypatch.setattr(status.UpdateWatch, "get", none)


async def health(monkeypatch: pytest.MonkeyPatch, stages: Any, missing: dict[str, str]) -> tuple[int, dict[str, Any]]:
    async def nobody(_: ReplicaPoll) -> list[Any]:
        return []

    monkeypatch.setattr(ReplicaPoll, "get", nobody)
    monkeypatch.setattr(status, "missing_parts", lambda *_: dict(missing))
    monkeypatch.setattr(status, "starting", stages)
    page = Health(StatusArgs(drafts="drafts"))
    await page.check_health()
    answer = await page(Request({"type": "http", "method": "GET"}))
    return answer.status_code, json.loads(bytes(answer.body))


async def test_what_replicas_do_that_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"router": "no replica answers", "target": "no router has a link to one"}

    def stages(application: str) -> dict[str, str]:
        deployment = {"specdec": "TargetServer", "drafts": "DraftServer"}[application]
        return {deployment: LOADS[deployment]}

    code, answer = await health(monkeypatch, stages, missing)
    told = {"TargetServer": LOADS["TargetServer"]}
    assert (code, answer["status"], answer["starting"]) == (503, "unavailable", told)
    assert answer["drafts"] == {"drafts": LOADS["DraftServer"]}
    assert answer["missing"] == missing | {"target": "loading x: 3.1 of 7.5 GB"}


async def test_why_nothing_is_drafted_is_told_of_a_service_that_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    why = {"DraftServer": "no drafts: it has another vocabulary"}
    code, answer = await health(monkeypatch, lambda name: why if name == "drafts" else pytest.fail("not asked"), {})
    assert (code, answer) == (200, {"status": "ready", "missing": {}, "drafts": {"drafts": why["DraftServer"]}})
    assert await health(monkeypatch, lambda _: {}, {}) == (200, {"status": "ready", "missing": {}})


async def test_a_head_that_does_not_answer_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> dict[str, str]:
        raise ConnectionError

    code, answer = await health(monkeypatch, broken, {"target": "all of them drain"})
    assert (code, answer["missing"], answer["starting"]) == (503, {"target": "all of them drain"}, {})


async def test_only_get_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await Health(StatusArgs())(Request({"type": "http", "method": "POST"}))
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert json.loads(bytes(answer.body))["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("missing", [{}, {"target": "all of them drain"}])
async def test_an_update_is_told_and_changes_no_status(
    monkeypatch: pytest.MonkeyPatch, missing: dict[str, str]
) -> None:
    late = {"status": "late", "seconds": 901.0, "waiting_for": {"TargetServer": "waits for room"}}

    async def update(_: Any) -> dict[str, Any]:
        return late

    monkeypatch.setattr(status.UpdateWatch, "get", update)
    code, answer = await health(monkeypatch, lambda _: {}, missing)
    assert (code, answer["update"]) == (503 if missing else 200, late)


@pytest.mark.parametrize(
    ("service", "pool", "shown"),
    [(None, None, None), (None, "late", "late"), ("under_way", "late", "late"), ("failed", "late", "failed")],
)
async def test_of_the_updates_of_service_and_draft_pool_the_worse_is_told(
    monkeypatch: pytest.MonkeyPatch, service: str | None, pool: str | None, shown: str | None
) -> None:
    states = {"specdec": service, "drafts": pool}

    async def update(watch: status.UpdateWatch) -> dict[str, Any] | None:
        state = states[watch._application]
        return None if state is None else {"status": state}

    monkeypatch.setattr(status.UpdateWatch, "get", update)
    _, answer = await health(monkeypatch, lambda _: {}, {})
    assert answer.get("update", {}).get("status") == shown
