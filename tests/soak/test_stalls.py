"""A layer that blocks costs its replica, a long step whose layers advance does not; no stream changes a token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.kills import Stream, Streams
from tests.integration.poison import beside
from tests.integration.running import RunningService
from tests.integration.stalls import BLOCK, HOOK, STEP_TIMEOUT_S, TWENTY_SECONDS, asking_for


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = RunningService(
        "--num-speculative-tokens", "4", "--logits-processors", HOOK, "--step-timeout-s", str(STEP_TIMEOUT_S)
    )
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize(("token", "deaths"), [(BLOCK, 1), (TWENTY_SECONDS, 0)], ids=["block", "20 s"])
def test_a_layer_that_blocks_costs_its_replica_and_a_long_step_does_not(
    service: RunningService, streams: Streams, undisturbed: list[Stream], token: int, deaths: int
) -> None:
    outcome = beside(service, streams, undisturbed, asking_for(token, service.model))
    assert outcome.status == 200, outcome.error
    assert outcome.answer["usage"]["completion_tokens"] == 40
    assert outcome.compared is not None
    assert not outcome.compared.broken
    assert outcome.compared.is_exact
    assert outcome.compared.longest_pause_s > STEP_TIMEOUT_S, "no step took so long"
    assert outcome.deaths == {"target": deaths, "draft": 0, "router": 0, "ingress": 0}
