"""Whose a sequence is, and what its priority may order, by ``limits.priorities``."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from cluster.config.limits import Limits
from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.service import ApiSettings

from .conftest import Bench

KEYS = {"ops": "sk-ops-0123456789abc", "user": "sk-user-0123456789ab"}


async def sent(
    tokenizer: PreTrainedTokenizerFast, allowed: str, key: str, priority: int
) -> tuple[int, dict[str, Any], list[tuple[bytes, int]]]:
    """The status and body of an answer, and the owner and priority of each sequence that was opened."""
    bench = Bench(tokenizer)
    bench.says("yes")
    settings = ApiSettings(Limits.model_validate({"priorities": allowed}), admin_keys=("ops",))
    app = create_app(bench.service, settings, tokenizer, bench.observer, ApiKeys(KEYS if key else {}))
    headers = {"Authorization": f"Bearer {KEYS[key]}"} if key else {}
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
        answer = await http.post("/v1/completions", json={"model": "demo", "prompt": "x", "priority": priority})
    opened = [(request.spec.owner, request.spec.order[0]) for request in bench.service.opened]
    return answer.status_code, answer.json(), opened


@pytest.mark.parametrize("key", ["ops", "user", ""])
async def test_off_refuses_a_priority_and_names_the_key(tokenizer: PreTrainedTokenizerFast, key: str) -> None:
    status, body, opened = await sent(tokenizer, "off", key, -1)
    assert (status, body["error"]["param"], opened) == (400, "priority", [])
    assert "limits.priorities" in body["error"]["message"]
    assert (await sent(tokenizer, "off", key, 0))[0] == 200


def owner(key: str) -> bytes:
    return sha256(key.encode()).digest()[:8]


@pytest.mark.parametrize(
    ("allowed", "key", "priority", "opened"),
    [
        ("own", "user", -1, (owner("user"), 0)),
        ("own", "ops", -1, (owner("ops"), 0)),
        ("all", "user", -1, (owner("user"), 0)),
        ("all", "ops", -1, (b"", -1)),
        ("all", "ops", 3, (owner("ops"), 0)),
        ("own", "", -1, (b"", -1)),
    ],
)
async def test_a_priority_passes_only_whom_it_may(
    tokenizer: PreTrainedTokenizerFast, allowed: str, key: str, priority: int, opened: tuple[bytes, int]
) -> None:
    """``order`` is what counts between owners; that of an owner is always 0."""
    assert (await sent(tokenizer, allowed, key, priority))[::2] == (200, [opened])
