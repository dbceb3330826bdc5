"""Clients that go away or take nothing, and many requests of all kinds: nothing is kept, and nobody is held up."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest

from tests.integration.mixed import mixed_requests
from tests.integration.running import RunningService, eventually, nothing_held
from tests.integration.slow_clients import SILENT, WINDOW, asking

logger = logging.getLogger(__name__)


def test_a_client_that_goes_away_leaves_nothing(service: RunningService) -> None:
    body = {"model": "specdec-demo", "prompt": "import os\n", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: httpx2 hangs up when its iterator is collected
        next(lines)
        eventually(lambda: sum(map(bool, service.worker_gauge("kv_blocks_in_use").values())) == 2, 60, "both hold it")
    took_s = eventually(lambda: nothing_held(service), 60, "the sequence and its blocks are gone from both workers")
    logger.warning("gone from both workers, as the metrics say, %.2f s after the disconnect", took_s)


def resident_bytes(service: RunningService) -> int:
    return sum(child.memory_info().rss for child in service.children())


@pytest.mark.parametrize("kind", [WINDOW, SILENT])
def test_clients_that_take_nothing_hold_nothing_and_nobody_up(service: RunningService, kind: str) -> None:
    """Their answers are made and wait for them, some hundred kilobytes each; their sequences have ended."""
    other = {"model": "specdec-demo", "prompt": "def f(x):\n", "max_tokens": 30, "seed": 1}

    def answer() -> str:
        told = httpx2.post(f"{service.url}/v1/completions", json=other, timeout=60)
        return str(told.json()["choices"][0]["text"])

    wanted, before = answer(), resident_bytes(service)
    body = {"model": "specdec-demo", "prompt": "import os\n", "max_tokens": 500, "stream": True, "logprobs": 20}
    with ExitStack() as stack:
        clients = [stack.enter_context(asking(service.url, kind, body | {"ignore_eos": True})) for _ in range(4)]
        assert [answer() for _ in range(3)] == [wanted] * 3
        eventually(lambda: nothing_held(service), 120, "their sequences have ended, and hold no block")
        assert resident_bytes(service) - before < 128 << 20
        assert answer() == wanted
        if kind == WINDOW:  # who reads after all gets all of it
            rest = b"".join(iter(lambda: clients[0].recv(1 << 20), b""))
            assert rest.count(b"data: {") >= 500 / 9
            assert b"data: [DONE]" in rest
            assert len(rest) > 100 * 500


def test_after_mixed_requests_and_cancellations_nothing_is_held(service: RunningService) -> None:
    requests = mixed_requests(100)
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda request: request.send(service.url, "specdec-demo"), requests))
    assert all(text is not None for request, text in zip(requests, texts, strict=True) if not request.leaves)
    took_s = eventually(lambda: nothing_held(service), 60, "no sequence and no block is held")
    logger.warning("%d requests, %d left: all free %.2f s later", len(requests), texts.count(None), took_s)
