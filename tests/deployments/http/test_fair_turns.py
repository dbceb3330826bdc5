"""One API key's long work, however much of it, delays another key's by no more than a turn."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2
import pytest

from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.service import ApiSettings

from .conftest import Bench

KEYS = {"a": "sk-a-0123456789abcdef", "b": "sk-b-0123456789abcdef"}


class Slow:
    """Stands before some work, and holds up what is slow in it."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.num_begun = 0
        self.may_end = threading.Event()

    def __call__(self, text: str, *args: Any, **options: Any) -> Any:
        if "slow" in text:
            self.num_begun += 1
            assert self.may_end.wait(20)
        return self._work(text, *args, **options)


@pytest.mark.parametrize(
    ("path", "field", "patched"),
    [
        ("/tokenize", "prompt", "encode"),
        ("/v1/completions", "prompt", "encode"),
        ("/v1/completions", "guided_regex", "takes_too_much"),
    ],
)
async def test_another_keys_work_is_done_while_one_keys_is_held_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, path: str, field: str, patched: str
) -> None:
    if patched == "encode":
        slow = Slow(bench.tokenizer.encode)
        monkeypatch.setattr(bench.tokenizer, "encode", slow)
    else:
        slow = Slow(lambda text: False)
        monkeypatch.setattr("specdec.structured.compiler.takes_too_much", slow)
    bench.says("x")
    bench.max_model_len = 100_000
    bench.__post_init__()
    app = create_app(bench.service, ApiSettings(), bench.tokenizer, bench.observer, ApiKeys(KEYS))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as client:

        async def send(key: str, text: str) -> httpx2.Response:
            body = {"model": "demo", "prompt": "x", field: text * 200}
            return await client.post(path, json=body, headers={"Authorization": f"Bearer {KEYS[key]}"})

        many = [asyncio.create_task(send("a", f"slow {number} and so on ")) for number in range(6)]
        async with asyncio.timeout(30):
            while slow.num_begun < 2:
                await asyncio.sleep(0.001)
            for number in range(2):
                assert (await send("b", f"quick {number} and so on ")).status_code == 200
        assert slow.num_begun == 2, "one key has not all threads"
        slow.may_end.set()
        assert {(await one).status_code for one in many} == {200}
