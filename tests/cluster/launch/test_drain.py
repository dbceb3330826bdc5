from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.launch import local, replicas
from cluster.launch.local import drain_ingress


class Replica:
    """An ingress that has so many requests open, one less each time that it is told to drain."""

    def __init__(self, num_open: int, *failures: Exception) -> None:
        self.num_open = num_open
        self._failures = list(failures)
        self.calls: list[str] = []

    async def get_async(self) -> int:
        if self._failures:
            raise self._failures.pop(0)
        self.num_open = max(0, self.num_open - 1)
        return self.num_open


class Handle:
    """Serve's handle of the ingress, as far as a drain needs it."""

    app_name, deployment_name = "app", "Ingress"

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)

    def broadcast(self, method: str) -> Handle:
        for replica in self.replicas:
            replica.calls.append(method)
        return self

    async def _fetch_replica_results_async(self) -> list[Replica]:
        if not self.replicas:
            raise DeploymentUnavailableError(DeploymentID("Ingress", "app"))
        return self.replicas


def test_it_waits_for_the_last_request_of_every_replica(monkeypatch):
    monkeypatch.setattr(local, "POLL_S", 0.0)
    short, long = Replica(2), Replica(5)
    running: list[int | None] = []
    assert drain_ingress(Handle(short, long), 60, report=running.append)
    assert long.calls == ["drain_requests"] * 5
    assert short.calls == long.calls, "a replica that started again is told again"
    assert running == [5, 3, 2, 1]


def test_a_replica_that_has_died_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(local, "POLL_S", 0.0)
    assert drain_ingress(Handle(Replica(2), Replica(9, *[ActorDiedError()] * 9)), 60)


@pytest.mark.parametrize("is_listed", [False, True])
def test_without_a_replica_serve_says_whether_one_runs(monkeypatch, is_listed):
    """A new handle may not know of any yet."""
    monkeypatch.setattr(local, "POLL_S", 0.0)
    states = [{"RUNNING": 1}, {}] if is_listed else [{}]
    asked: list[int] = []

    def status() -> SimpleNamespace:
        deployment = SimpleNamespace(replica_states=states[len(asked)])
        asked.append(1)
        return SimpleNamespace(applications={"app": SimpleNamespace(deployments={"Ingress": deployment})})

    monkeypatch.setattr(serve, "status", status)
    assert drain_ingress(Handle(), 60)
    assert len(asked) == len(states)


def test_a_replica_that_cannot_be_reached_is_not_idle(monkeypatch):
    monkeypatch.setattr(local, "POLL_S", 0.0)
    unreachable = Replica(3, ActorUnavailableError("no route", None), ConnectionError())
    running: list[int | None] = []
    assert drain_ingress(Handle(Replica(1), unreachable), 60, report=running.append)
    assert running == [None, 2, 1]


def test_a_replica_that_hangs_is_waited_for_until_the_time_is_over(monkeypatch):
    monkeypatch.setattr(replicas, "PATIENCE_S", 0.01)

    class Hanging(Replica):
        async def get_async(self):
            await asyncio.sleep(3600)

    running: list[int | None] = []
    assert not drain_ingress(Handle(Replica(1), Hanging(0)), 0.1, report=running.append)
    assert running == [None]


def test_requests_that_do_not_end_are_given_up_after_the_time_limit():
    replica = Replica(10**9)
    assert not drain_ingress(Handle(replica), 0.0)
    assert replica.calls == ["drain_requests"], "it is told even where no time is given"


def test_nobody_is_asked_where_ray_has_died():
    replica = Replica(1)
    assert not drain_ingress(Handle(replica), 60, lambda: False)
    assert replica.calls == []


def test_what_has_not_changed_is_not_told_again(monkeypatch):
    monkeypatch.setattr(local, "POLL_S", 0.0)
    counts = iter([3, 3, 1, 1, 0])

    class Slow(Replica):
        async def get_async(self):
            return next(counts)

    calls: list[int | None] = []
    assert drain_ingress(Handle(Slow(0)), 60, report=calls.append)
    assert calls == [3, 1]
