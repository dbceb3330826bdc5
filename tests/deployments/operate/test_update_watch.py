"""What ``/health`` says of an update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.operate.status import Health, StatusArgs, UpdateWatch, described

FAILED = "Traceback\n  File x\nspecdec.core.errors.MemoryPlanError: no room"


def deployment(status: str, states: dict[str, int], message: str = "") -> Any:
    return SimpleNamespace(status=SimpleNamespace(value=status), replica_states=states, message=message)


def application(status: str, message: str = "", **deployments: Any) -> Any:
    return SimpleNamespace(status=SimpleNamespace(value=status), message=message, deployments=deployments)


HEALTHY = deployment("HEALTHY", {"RUNNING": 1})
WAITS = deployment(
    "UPDATING",
    {"RUNNING": 1, "STARTING": 1},
    "Deployment 'TargetServer' has 1 replicas that have taken more than 30s to be scheduled. "
    "Resources required for each replica: {'GPU': 1.0}, total resources available: {}.",
)


@pytest.mark.parametrize("found", [None, application("RUNNING", TargetServer=HEALTHY), application("UNHEALTHY")])
def test_nothing_is_said_without_an_update(found: Any) -> None:
    assert described(found, 60, 100) is None


@pytest.mark.parametrize(("age_s", "status"), [(59, "under_way"), (61, "late")])
def test_an_update_without_a_place_is_late_after_a_while(age_s: float, status: str) -> None:
    found = described(application("DEPLOYING", TargetServer=WAITS, SpeculationRouter=HEALTHY), 60, age_s)
    assert found is not None
    assert (found["status"], found["seconds"]) == (status, age_s)
    assert found["waiting_for"].keys() == {"TargetServer"}
    assert "waits for room; it asks for {'GPU': 1.0}" in found["waiting_for"]["TargetServer"]


def test_an_update_that_failed_says_why() -> None:
    failed = deployment("DEPLOY_FAILED", {"RUNNING": 1}, FAILED)
    found = described(application("DEPLOY_FAILED", TargetServer=failed, OpenAIIngress=HEALTHY), 60, 110)
    assert found is not None
    assert (found["status"], found["waiting_for"]) == (
        "failed",
        {"TargetServer": "specdec.core.errors.MemoryPlanError: no room"},
    )
    found = described(application("DEPLOY_FAILED", FAILED, OpenAIIngress=HEALTHY), 60, 110)
    assert found is not None
    refused = {"application": "specdec.core.errors.MemoryPlanError: no room"}
    assert found["waiting_for"] == refused, "the builder refused it"


async def test_serve_is_not_asked_each_time_and_may_not_answer() -> None:
    asked: list[int] = []

    def status() -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise ConnectionError
        return SimpleNamespace(applications={"a": application("DEPLOYING", TargetServer=WAITS)})

    watch = UpdateWatch("a", 1.0, status)
    first = await watch.get()
    assert first is not None
    assert (await watch.get(), len(asked)) == (first, 1)
    watch._asked_s = float("-inf")
    assert (await watch.get(), len(asked)) == (first, 2), "what it said holds"
    watch._asked_s, watch._since_s = float("-inf"), watch._since_s - 100
    later = await watch.get()
    assert later is not None
    assert (later["status"], len(asked)) == ("late", 3), "and the seconds go on"


async def test_seconds_count_from_when_the_update_was_first_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, running, updating = 1000.0, application("RUNNING"), application("DEPLOYING", TargetServer=WAITS)
    found = running
    monkeypatch.setattr("deployments.operate.status.time.monotonic", lambda: now_s)
    watch = UpdateWatch("a", 60.0, lambda: SimpleNamespace(applications={"a": found}))
    seen = []
    for application_now, pause_s in ((running, 500), (updating, 40), (updating, 30), (running, 100), (updating, 5)):
        found = application_now
        update = await watch.get()
        seen.append(None if update is None else (update["status"], update["seconds"]))
        now_s += pause_s
    assert seen == [None, ("under_way", 0), ("under_way", 40), None, ("under_way", 0)]
    found = updating
    now_s += 60
    update = await watch.get()
    assert update is not None
    assert update["status"] == "late"


async def test_ray_is_told_of_each_application_whether_its_update_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"specdec": application("DEPLOYING", TargetServer=WAITS), "pool": application("RUNNING")}
    told_of: dict[str, float] = {}
    now_s = 1000.0
    monkeypatch.setattr("deployments.operate.status.time.monotonic", lambda: now_s)
    health = Health(StatusArgs(update_timeout_s=60, drafts="pool"))
    monkeypatch.setattr("deployments.operate.status.starting", lambda _: {})
    monkeypatch.setattr(health._late, "set", lambda value, tags: told_of.update({tags["application"]: value}))
    for pause_s, is_late in ((0, 0), (59, 0), (2, 1)):
        now_s += pause_s
        for watch in health._updates.values():
            watch._asked_s, watch._status = float("-inf"), lambda: SimpleNamespace(applications=found)
        await health.check_health()
        assert told_of == {"specdec": is_late, "pool": 0}
