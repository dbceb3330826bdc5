"""Two replicas of each deployment, one process killed after the other: no stream loses, doubles or changes a token."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.integration.kills import (
    TAKE_CONNECTIONS,
    VICTIMS,
    Comparison,
    Stream,
    Streams,
    start,
    under_kill,
)
from tests.integration.running import RunningService

logger = logging.getLogger(__name__)

LIKE_NOTHING_HAPPENED = [victim for victim in VICTIMS if victim not in TAKE_CONNECTIONS]


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = start(replicas=2)
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("victim", LIKE_NOTHING_HAPPENED)
def test_a_killed_process_changes_no_stream(
    service: RunningService, streams: Streams, undisturbed: list[Stream], victim: str
) -> None:
    compared = Comparison.of(under_kill(service, streams, victim).streams, undisturbed)
    assert not compared.broken
    assert compared.is_exact


RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array", "maxItems": 3}},
        "required": ["name", "sizes"],
        "additionalProperties": False,
    },
    "minItems": 60,
}


@pytest.mark.parametrize("victim", ["target", "draft"])
def test_a_killed_worker_changes_no_structured_output(service: RunningService, victim: str) -> None:
    """Whoever takes a sequence over makes its matcher again from the log."""
    streams = Streams(service.url, service.model, count=6, max_tokens=300, fields={"guided_json": RECORDS})
    with streams.running() as wait:
        undisturbed = wait()
    assert all(stream.text.startswith('[{"name":') for stream in undisturbed)
    compared = Comparison.of(under_kill(service, streams, victim).streams, undisturbed)
    assert not compared.broken
    assert compared.is_exact


EDITED = {
    "prompt": "".join(f"def function_{i}(values):\n    return values\n\n" for i in range(24)),
    "max_tokens": 200,
    "logprobs": 2,
    "top_p": 0.95,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 1.0},
}


@pytest.mark.parametrize(("victim", "temperature"), [("target", {}), ("draft", {"temperature": 0})])
def test_a_killed_worker_changes_no_stream_that_asks_for_all(
    service: RunningService, victim: str, temperature: dict[str, object]
) -> None:
    """Edited logits, log probabilities, and a prompt that was read before, on either replica."""
    streams = Streams(service.url, service.model, count=8, fields=EDITED | temperature)
    with streams.running() as wait:
        undisturbed = wait()
    counted = ("prefix_cache_hits", "spec_decode_num_accepted_tokens")
    before = {name: service.count(name) for name in counted}
    compared = Comparison.of(under_kill(service, streams, victim).streams, undisturbed)
    assert not compared.broken
    assert compared.is_exact
    assert [name for name in counted if service.count(name) <= before[name]] == []


@pytest.mark.parametrize("victim", TAKE_CONNECTIONS)
def test_a_killed_ingress_or_proxy_takes_its_own_connections_only(
    service: RunningService, streams: Streams, undisturbed: list[Stream], victim: str
) -> None:
    compared = Comparison.of(under_kill(service, streams, victim).streams, undisturbed)
    assert compared.broken
    assert compared.is_exact
    if victim == "ingress":
        assert len(compared.broken) < streams.count, "the other ingress' streams broke as well"
    with streams.running() as wait:
        again = wait()
    assert Comparison.of(again, undisturbed).is_exact
