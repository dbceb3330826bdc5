"""Requests of many kinds, some of whose clients go away before the end."""

from __future__ import annotations

import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from tests.integration.running import RunningService, eventually, nothing_held

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MixedRequest:
    """One request.

    Attributes:
        index: Makes its prompt, its temperature and its seed.
        chat: Of the chat endpoint.
        stream: Whether its answer is streamed.
        max_tokens: Most output tokens.
        num_speculative_tokens: None leaves it to the service.
        leaves: Whether its client goes away, after the first line of a stream or after a moment.
    """

    index: int
    chat: bool
    stream: bool
    max_tokens: int
    num_speculative_tokens: int | None
    leaves: bool

    def send(self, url: str, model: str) -> str | None:
        """The text of the answer; None if its client went away."""
        path = f"{url}/v1/{'chat/' if self.chat else ''}completions"
        timeout_s = 0.5 if self.leaves and not self.stream else 240
        try:
            with httpx2.stream("POST", path, json=self._body(model), timeout=timeout_s) as answer:
                lines = answer.iter_lines()  # kept: httpx2 hangs up when its iterator is collected
                if self.leaves:
                    next(lines)
                    return None
                assert answer.status_code == 200, answer.read()
                # Lines that begin with a colon are comments: nothing was sent for a while.
                lines = (line for line in lines if line not in ("", "data: [DONE]") and not line.startswith(":"))
                events = [line.removeprefix("data: ") for line in lines]
        except httpx2.ReadTimeout:
            assert self.leaves
            return None
        return "".join(_text(choice) for event in events for choice in json.loads(event)["choices"])

    def _body(self, model: str) -> dict[str, Any]:
        prompt = f"x_{self.index} = {self.index}\n" * (1 + self.index % 11)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body |= {"model": model, "stream": self.stream, "temperature": self.index % 2, "seed": self.index}
        body |= {"max_tokens": 150 if self.leaves else self.max_tokens, "ignore_eos": self.leaves}
        if self.num_speculative_tokens is not None:
            body["num_speculative_tokens"] = self.num_speculative_tokens
        return body


def mixed_requests(num_requests: int, seed: int = 3) -> list[MixedRequest]:
    """The same for a seed; a third of the clients go away."""
    rng = random.Random(seed)
    return [
        MixedRequest(
            index,
            chat=rng.random() < 0.4,
            stream=rng.random() < 0.5,
            max_tokens=rng.randint(1, 48),
            num_speculative_tokens=rng.choice((0, 1, 4, 8, None)),
            leaves=rng.random() < 0.33,
        )
        for index in range(num_requests)
    ]


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")


SCARCE = ("--max-model-len", "384", "--max-num-seqs", "2", "--target-kv-cache-memory", "64MiB")
"""Blocks for 768 tokens on each worker."""
NUM_CLIENTS = 16


def check_mixed_requests(service: RunningService, model: str, num_requests: int) -> None:
    """Many more requests at once than there is room for, of which some are left alone by their clients.

    Those that wait for their turn hold nothing, so that few are ever preempted: that the log tells.
    """
    requests = mixed_requests(num_requests)
    num_before = service.worker_gauge("evictions")
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        texts = list(pool.map(lambda request: request.send(service.url, model), requests))
    stayed = [(request, text) for request, text in zip(requests, texts, strict=True) if not request.leaves]
    assert all(text is not None for _, text in stayed)
    took_s = eventually(lambda: nothing_held(service), 60, "no sequence, no block and no state slot is held")
    num_evictions = {role: num - num_before.get(role, 0) for role, num in service.worker_gauge("evictions").items()}
    reusable = {name: service.worker_gauge(f"{name}_reusable") for name in ("kv_blocks", "state_slots")}
    assert reusable["kv_blocks"]["target"] > 0
    assert reusable["state_slots"]["target"] > 0
    logger.warning(
        "%d requests, %d left by their clients; taken from a sequence: %s; all free %.2f s later, for reuse: %s",
        num_requests,
        num_requests - len(stayed),
        num_evictions,
        took_s,
        reusable,
    )
    for request, text in stayed[:: len(stayed) // 6]:
        assert replace(request, num_speculative_tokens=0, stream=False).send(service.url, model) == text
