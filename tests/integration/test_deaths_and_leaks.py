"""Workers killed under load, clients that go away: nothing is lost, nothing is kept."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import OpenAI

from tests.integration.mixed import mixed_requests
from tests.integration.running import RunningService, eventually, nothing_held

logger = logging.getLogger(__name__)

NUM_STREAMS = 8
SEEN: dict[int, int] = {}
"""Pieces that each running stream has had."""


def stream(client: OpenAI, i: int, temperature: float) -> tuple[str, float]:
    """One seeded stream to its end; gives its text and its longest pause in seconds."""
    pieces, pause_s, heard_s = [], 0.0, time.monotonic()
    SEEN[i] = 0
    chunks = client.completions.create(
        model="specdec-demo",
        prompt=f"def function_{i}(values):\n",
        max_tokens=640,
        temperature=temperature,
        seed=100 + i,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in chunks:
        pieces.append(chunk.choices[0].text)
        SEEN[i] = len(pieces)
        pause_s = max(pause_s, time.monotonic() - heard_s)
        heard_s = time.monotonic()
    return "".join(pieces), pause_s


def all_streams(service: RunningService, pool: ThreadPoolExecutor) -> list:
    """Eight streams at once, half of them at T=0, half at T=1.

    Clients are there before: on a busy machine making the last took until the first stream had ended.
    """
    clients = [service.client() for _ in range(NUM_STREAMS)]
    return [pool.submit(stream, client, i, i % 2) for i, client in enumerate(clients)]


@pytest.mark.parametrize("deployment", ["DraftServer", "TargetServer"])
def test_a_killed_worker_changes_no_text(service: RunningService, deployment: str) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        undisturbed = [future.result() for future in all_streams(service, pool)]
        SEEN.clear()
        streams = all_streams(service, pool)
        eventually(lambda: len(SEEN) == NUM_STREAMS and min(SEEN.values()) >= 2, 60, "all streams have begun")
        assert not [future.exception() for future in streams if future.done()], "they have ended already"
        killed = service.kill(deployment)
        disturbed = [future.result() for future in streams]
    assert [text for text, _ in disturbed] == [text for text, _ in undisturbed]
    assert all(text for text, _ in disturbed)
    logger.warning(
        "killed %s: longest pause %.2f s, undisturbed %.2f s",
        deployment,
        max(pause_s for _, pause_s in disturbed),
        max(pause_s for _, pause_s in undisturbed),
    )
    eventually(lambda: service.pid_of(deployment) not in (None, killed), 60, "the replica is replaced")
    eventually(lambda: set(service.worker_gauge("num_sequences")) == {"target", "drafter"}, 60, "both are linked")


def test_a_client_that_goes_away_leaves_nothing(service: RunningService) -> None:
    body = {"model": "specdec-demo", "prompt": "import os\n", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: httpx hangs up when its iterator is collected
        next(lines)
        eventually(lambda: sum(map(bool, service.worker_gauge("kv_blocks_in_use").values())) == 2, 60, "both hold it")
    took_s = eventually(lambda: nothing_held(service), 60, "the sequence and its blocks are gone from both workers")
    logger.warning("gone from both workers, as the metrics say, %.2f s after the disconnect", took_s)


def test_after_mixed_requests_and_cancellations_nothing_is_held(service: RunningService) -> None:
    requests = mixed_requests(200)
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda request: request.send(service.url, "specdec-demo"), requests))
    assert all(text is not None for request, text in zip(requests, texts, strict=True) if not request.leaves)
    took_s = eventually(lambda: nothing_held(service), 60, "no sequence and no block is held")
    logger.warning("%d requests, %d left: all free %.2f s later", len(requests), texts.count(None), took_s)
