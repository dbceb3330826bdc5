"""What replicas say while they start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from ray.experimental import internal_kv

from cluster.launch import startup as module
from cluster.launch.startup import starting, startup


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Ray's key-value store, in place of Ray."""
    held: dict[str, bytes] = {}
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(internal_kv, "_internal_kv_put", lambda k, v, namespace: held.update({k: v.encode()}))
    monkeypatch.setattr(internal_kv, "_internal_kv_del", lambda k, namespace: held.pop(k))
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda k, namespace: held.get(k.decode()))
    monkeypatch.setattr(
        internal_kv, "_internal_kv_list", lambda p, namespace: [k.encode() for k in held if k.startswith(p)]
    )
    yield held
    assert held == {}, "a line is left of a replica that does not start"


def test_the_newest_line_of_a_deployment_is_told_until_its_replicas_have_started(store: dict[str, bytes]) -> None:
    with startup("specdec", "TargetServer", "a") as say, startup("specdec", "TargetServer", "b") as other:
        assert starting("specdec") == {}
        say("loading x: 3.1 of 7.5 GB")
        other("loading x")
        assert starting("specdec") == {"TargetServer": "loading x"}
        say("compiling the layers of x")
        with startup("specdec", "DraftServer", "a") as draft, startup("another", "DraftServer", "a") as stranger:
            draft("timing its steps")
            stranger("loading y")
            assert starting("specdec") == {
                "TargetServer": "compiling the layers of x",
                "DraftServer": "timing its steps",
            }
    assert starting("specdec") == {}


def test_a_replica_that_fails_takes_its_line_away(store: dict[str, bytes]) -> None:
    with suppress(MemoryError), startup("specdec", "TargetServer", "a") as say:
        say("loading x")
        raise MemoryError


def test_no_start_fails_because_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(internal_kv, "_internal_kv_put", broken)
    monkeypatch.setattr(internal_kv, "_internal_kv_del", broken)
    with startup("specdec", "TargetServer", "a") as say:
        say("loading x")
