"""Two drafters for every sequence, each a deployment of its own: one is killed under load, and no token changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.models.demos import demo_folder
from tests.integration.kills import Comparison, Streams, under_kill
from tests.integration.running import RunningService, eventually


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """The demo pair with its draft model twice: whichever is in time earns a token."""
    target, draft = str(demo_folder("target")), str(demo_folder("draft"))
    flags = ("--target", target, "--draft", draft, "--drafters", f"twin={draft}", "--num-speculative-tokens", "3")
    running = RunningService(*flags)
    yield running
    assert running.stop() == 0


def earned(service: RunningService) -> dict[str, float]:
    return {name: service.count("accepted_tokens_by_drafter", f'drafter="{name}"') for name in ("drafter", "twin")}


def texts_of(service: RunningService, **fields: object) -> tuple[str, ...]:
    with Streams(service.url, service.model, count=4, max_tokens=100, fields=fields).running() as finish:
        return tuple(stream.text for stream in finish())


def test_the_text_is_the_targets_while_one_of_two_drafters_is_killed(service: RunningService) -> None:
    plain = texts_of(service, num_speculative_tokens=0)
    assert texts_of(service) == plain
    eventually(lambda: texts_of(service) == plain and min(earned(service).values()) > 0, 120, "each has earned tokens")
    before, streams = earned(service), Streams(service.url, service.model, count=8, max_tokens=400)
    with streams.running() as finish:
        undisturbed = finish()
    num_reopened = service.count("reopened")
    compared = Comparison.of(under_kill(service, streams, "twin").streams, undisturbed)
    assert not compared.broken
    assert compared.is_exact
    assert service.count("reopened") > num_reopened
    assert all(count > before[name] for name, count in earned(service).items())
