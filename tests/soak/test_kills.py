"""Two replicas of each deployment, and kills at random: no stream loses, doubles or changes a token."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx2
import pytest

from tests.integration.kills import Comparison, Streams, kill_one, start, under_kill, under_random_kills
from tests.integration.mixed import mixed_requests
from tests.integration.running import RunningService, eventually, nothing_held

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = start(replicas=2)
    yield running
    assert running.stop() == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victims", ["target target", "target router", "draft target", "router router"])
def test_two_deaths_at_once_change_no_stream(service: RunningService, victims: str) -> None:
    streams = Streams(service.url, service.model, count=8, max_tokens=400)
    with streams.running() as wait:
        undisturbed = wait()
    compared = Comparison.of(under_kill(service, streams, *victims.split()).streams, undisturbed)
    assert not compared.broken
    assert compared.is_exact


@pytest.mark.timeout(900)
def test_ten_random_kills_change_no_stream(service: RunningService) -> None:
    streams = Streams(service.url, service.model, count=12, max_tokens=900)
    with streams.running() as wait:
        undisturbed = wait()
    rounds, killed = under_random_kills(service, streams, count=10, period_s=5.0, seed=7)
    assert len(killed) == 10
    for ended in rounds:
        compared = Comparison.of(ended, undisturbed)
        assert not compared.broken
        assert compared.is_exact


@pytest.mark.timeout(1500)
def test_ten_minutes_of_random_load_and_kills_leave_nothing_held(service: RunningService) -> None:
    """Clients come, go away and break their connections while processes are killed; then usage is 0 everywhere."""
    rng, end_s, model = random.Random(11), time.monotonic() + 600, service.model
    requests = itertools.cycle(mixed_requests(500))
    answers: list[bool] = []

    def client() -> None:
        while time.monotonic() < end_s:
            answered = False
            with suppress(httpx2.HTTPError, AssertionError, StopIteration):  # a killed ingress takes its connections
                answered = next(requests).send(service.url, model) is not None
            answers.append(answered)

    with ThreadPoolExecutor(12) as pool:
        clients = [pool.submit(client) for _ in range(12)]
        while time.monotonic() < end_s:
            time.sleep(20)
            kill_one(service, rng.choice(("draft", "target", "router", "ingress", "target", "draft")), rng)
        for future in clients:
            future.result()
    logger.warning("%d of %d requests were answered", sum(answers), len(answers))
    assert sum(answers) > len(answers) / 4
    eventually(service.is_ready, 120, "the service is ready again")
    eventually(lambda: nothing_held(service), 120, "no sequence, block or slot is held")
