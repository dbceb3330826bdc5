"""The official client against the demo pair as ``make serve`` starts it: the controller chooses what to draft."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.integration.drains import Refusal, under_sigterm
from tests.integration.kills import Streams
from tests.integration.running import RunningService
from tests.integration.test_openai_client import (  # noqa: F401 - collected here, on this service
    client,
    model,
    test_a_stream_is_the_whole_answer_in_pieces,
    test_drafts_change_no_token,
)

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = RunningService()
    logger.warning("ready %.1f s after the start", running.started_s)
    yield running
    assert running.stop() == 0


def test_whoever_waits_for_the_start_is_told_what_both_models_do(service: RunningService) -> None:
    for name in ("TargetServer", "DraftServer"):
        stages = [line.partition(f"{name}: ")[2] for line in service.lines if f"{name}: " in line]
        # A stage that passes between two looks is not seen; "loads the model" is said before any is.
        unknown = ["(loads the model)" in stage for stage in stages]
        assert unknown == sorted(unknown, reverse=True), stages
        assert [stage for stage in stages if "(" in stage and "(loads the model)" not in stage], stages
        assert [stage.startswith("ready") for stage in stages] == [False] * (len(stages) - 1) + [True]


def test_sigterm_under_eight_streams_breaks_none_and_refuses_the_next(service: RunningService) -> None:
    """The last of this file: the service ends, and leaves nothing behind."""
    drained = under_sigterm(service, Streams(service.url, service.model, count=8, max_tokens=600))
    assert not drained.compared.broken
    assert drained.compared.is_exact
    assert drained.told, "the streams had ended before anything was asked"
    assert set(drained.told) == {Refusal(503, "1", "service_unavailable")}
    assert 404 not in {refusal.status for refusal in drained.told_last}, "a client does not try again after a 404"
    assert drained.exit_code == 0
    running = [int(line.rpartition(": ")[2]) for line in service.lines if "draining, requests still running" in line]
    assert running == sorted(running, reverse=True)
    assert running[0] in (8, 9)  # the ninth is one that was asked before the ingress had heard
