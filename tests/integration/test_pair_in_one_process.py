"""A draft model in the process of each target: the same tokens, drafts among them, and a killed process breaks none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.drains import under_sigterm
from tests.integration.kills import Streams, compared_under_kill
from tests.integration.running import RunningService


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = RunningService("--draft-placement", "same_process", "--replicas-target", "2")
    yield running
    assert running.stop() == 0


def test_drafts_of_a_process_of_its_own_change_no_token(service: RunningService) -> None:
    """None, four, and as many as are worth their time."""
    counts = []
    texts = set()
    for fields in ({"num_speculative_tokens": 0}, {"num_speculative_tokens": 4}, {}):
        before = service.count("accepted_tokens_by_source", 'source="model"')
        streams = Streams(service.url, service.model, count=4, max_tokens=60, fields=fields)
        with streams.running() as finish:
            texts.add(tuple(stream.text for stream in finish()))
        counts.append(service.count("accepted_tokens_by_source", 'source="model"') - before)
    assert len(texts) == 1
    assert counts[0] == 0
    assert min(counts[1:]) > 20
    assert not any("DraftServer" in line for line in service.lines)
    assert any("the draft model runs in the target's process" in line for line in service.lines)


def test_a_killed_pair_changes_no_stream(service: RunningService) -> None:
    compared = compared_under_kill(service, "target")
    assert not compared.broken
    assert compared.is_exact


def test_a_pair_that_drains_finishes_its_streams(service: RunningService) -> None:
    """The last of this file: the service ends."""
    drained = under_sigterm(service, Streams(service.url, service.model, count=4, max_tokens=300))
    assert not drained.compared.broken
    assert drained.compared.is_exact
    assert drained.exit_code == 0
