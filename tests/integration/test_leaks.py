"""Clients that go away, and many requests of all kinds: nothing is kept."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.integration.mixed import mixed_requests
from tests.integration.running import RunningService, eventually, nothing_held

logger = logging.getLogger(__name__)


def test_a_client_that_goes_away_leaves_nothing(service: RunningService) -> None:
    body = {"model": "specdec-demo", "prompt": "import os\n", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: httpx hangs up when its iterator is collected
        next(lines)
        eventually(lambda: sum(map(bool, service.worker_gauge("kv_blocks_in_use").values())) == 2, 60, "both hold it")
    took_s = eventually(lambda: nothing_held(service), 60, "the sequence and its blocks are gone from both workers")
    logger.warning("gone from both workers, as the metrics say, %.2f s after the disconnect", took_s)


def test_after_mixed_requests_and_cancellations_nothing_is_held(service: RunningService) -> None:
    requests = mixed_requests(100)
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda request: request.send(service.url, "specdec-demo"), requests))
    assert all(text is not None for request, text in zip(requests, texts, strict=True) if not request.leaves)
    took_s = eventually(lambda: nothing_held(service), 60, "no sequence and no block is held")
    logger.warning("%d requests, %d left: all free %.2f s later", len(requests), texts.count(None), took_s)
