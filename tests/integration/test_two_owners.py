"""Two API keys at a service that is full: whatever one of them sends, the other gets its part of the tokens."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import httpx2
import pytest

from tests.integration.running import RunningService

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
ROWS = 4
NUM_TOKENS = 800
LEAST_SHARE = 0.4


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    keys = tmp_path_factory.mktemp("access") / "keys"
    keys.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    flags = ("--access-api-keys-file", str(keys), "--limits-priorities", "own", "--num-speculative-tokens", "0")
    running = RunningService(*flags, "--max-num-seqs", str(ROWS))
    yield running
    assert running.stop() == 0


async def test_each_owner_gets_its_part(service: RunningService) -> None:
    greedy: dict[str, object] = {"priority": -100, "n": 2}
    counts: Counter[str] = Counter()
    waited: Counter[str] = Counter()
    is_enough = asyncio.Event()

    async def one_stream(client: httpx2.AsyncClient, owner: str, number: int, fields: dict[str, object]) -> None:
        while True:
            body = {"model": "specdec-demo", "prompt": f"class A{number}:\n", "max_tokens": 64, "ignore_eos": True}
            headers = {"Authorization": f"Bearer {KEYS[owner]}"}
            asked = body | {"stream": True, "return_token_ids": True} | fields
            async with client.stream("POST", "/v1/completions", json=asked, headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line[6:])["choices"]:
                        waited[owner] += 1
                        if set(waited) == set(KEYS):  # both have begun
                            counts[owner] += len(choice.get("token_ids") or ())
                    if counts.total() >= NUM_TOKENS:
                        is_enough.set()

    async with httpx2.AsyncClient(base_url=service.url, timeout=120, trust_env=False) as client:
        streams = [one_stream(client, "alice", number, greedy) for number in range(3 * ROWS)]
        streams += [one_stream(client, "bob", number, {}) for number in range(ROWS)]
        tasks = list(map(asyncio.create_task, streams))
        enough = asyncio.create_task(is_enough.wait())
        done, _ = await asyncio.wait([*tasks, enough], return_when=asyncio.FIRST_COMPLETED, timeout=240)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert enough in done, [task.exception() for task in done] or counts
    shares = {owner: count / counts.total() for owner, count in counts.items()}
    assert min(shares.values()) >= LEAST_SHARE, shares
