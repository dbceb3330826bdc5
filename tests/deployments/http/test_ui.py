"""``GET /ui``, and what a stream tells it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from deployments.http.app import create_app
from deployments.http.keys import OPEN_PATHS, ApiKeys
from deployments.http.routes.pages import UI_PATHS
from deployments.http.service import ApiSettings
from specdec.core.messages import Notes, Plan, RoundTimes
from specdec.core.types import TokenLogprobs
from specdec.protocol.ingress import TokenDelta
from tests.letters import provenance

from .conftest import Bench

ASK = {"model": "demo", "prompt": "x", "stream": True}
TOLD = {"stream_options": {"include_speculation": True}}
TIMES = RoundTimes((5.0, 6.5), ((4.0, 4.5), (4.5, 5.5)))
PLAN = Plan(3, 2, acceptance_rate=0.75)


def client_of(bench: Bench, keys: dict[str, str] | None = None, *, ui: bool = True) -> httpx2.AsyncClient:
    app = create_app(bench.service, ApiSettings(ui=ui), bench.tokenizer, keys=ApiKeys(keys or {}))
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api")


async def choices(bench: Bench, **body: Any) -> list[dict[str, Any]]:
    path = "/v1/completions" if "messages" not in body else "/v1/chat/completions"
    body = {key: value for key, value in (ASK | body).items() if "messages" not in body or key != "prompt"}
    async with client_of(bench) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line.startswith("data: {")
    ]
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def test_the_page_and_its_parts_need_nothing_from_elsewhere_and_no_key(bench: Bench) -> None:
    async with client_of(bench, {"me": "secret"}) as http:
        parts = {path: await http.get(path) for path in UI_PATHS}
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/")).json()["ui"] == "/ui"
    assert set(UI_PATHS) <= OPEN_PATHS
    for path, part in parts.items():
        assert part.status_code == 200
        assert part.headers["content-type"] == f"{UI_PATHS[path][1]}; charset=utf-8"
        assert part.headers["content-security-policy"].startswith("default-src 'none'; ")
        assert "unsafe" not in part.headers["content-security-policy"]
        addresses = re.findall(r"https?://[^\"' ]+", part.text)
        assert addresses in ([], ["http://www.w3.org/2000/svg"])
    linked = re.findall(r'(?:src|href)="([^"]+)"', parts["/ui"].text)
    assert {f"/{path}" for path in linked} == set(UI_PATHS) - {"/ui"} | {"/data:,"}


async def test_model_output_reaches_the_page_as_text_alone(bench: Bench) -> None:
    async with client_of(bench) as http:
        script = (await http.get("/ui/ui.js")).text
        page = (await http.get("/ui")).text
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", script)
    assert not re.findall(r"<style|<script>| style=| on[a-z]+=", page)


async def test_where_the_page_is_off_it_is_not_there(bench: Bench) -> None:
    async with client_of(bench, ui=False) as http:
        answer = await http.get("/ui")
        assert "ui" not in (await http.get("/")).json()
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.parametrize("prompt", [{}, {"messages": [{"role": "user", "content": "x"}]}])
async def test_each_chunk_tells_how_its_tokens_came(bench: Bench, prompt: dict[str, Any]) -> None:
    ids = tuple(bench.tokenizer.encode("a = 1\nb = 2\n"))
    notes = Notes(
        provenance("ac" + "p" * (len(ids) - 2)),
        (0, 3, *[0] * (len(ids) - 2)),
        times=(None, TIMES, *[None] * (len(ids) - 2)),
    )
    bench.script = lambda request: [
        TokenDelta(ids[:2], notes.first(2), plan=PLAN),
        TokenDelta(ids[2:], notes.last(len(ids) - 2), "length"),
    ]
    opening = [{}] if prompt else []
    got = [choice.get("specdec", {}) for choice in await choices(bench, **prompt, **TOLD)]
    plan = {"num_draft_tokens": 3, "num_branches": 2, "mode": "outcomes", "acceptance_rate": 0.75, "draft_wait_s": 0.0}
    first = {
        "kind": ["accepted", "corrected"],
        "source": ["model", "model"],
        "num_draft_tokens": [0, 3],
        "times": [None, {"target": [5.0, 6.5], "draft": [[4.0, 4.5], [4.5, 5.5]]}],
        "plan": plan,
    }
    assert got == [
        *opening,
        first,
        {
            "kind": ["plain"] * (len(ids) - 2),
            "source": ["model"] * (len(ids) - 2),
            "num_draft_tokens": [0] * (len(ids) - 2),
            "times": [None] * (len(ids) - 2),
            "plan": plan,
        },
    ]
    assert bench.service.opened[0].spec.wants_times


async def test_a_stream_that_does_not_ask_tells_nothing_of_it(bench: Bench) -> None:
    bench.says("a = 1\n", 3)
    assert not any("specdec" in choice for choice in await choices(bench))
    assert not bench.service.opened[0].spec.wants_times


async def test_offsets_cut_the_text_into_its_tokens(bench: Bench) -> None:
    text = "x = '🙂'\n# ünd\n"
    ids = bench.tokenizer.encode(text)
    logprobs = tuple(TokenLogprobs(-0.5, 1) for _ in ids)
    bench.script = lambda request: [
        TokenDelta((token,), Notes(provenance("p"), (0,), (logprob,)), "length" if i == len(ids) - 1 else None)
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
    ]
    got = await choices(bench, logprobs=0, **TOLD)
    said = "".join(choice["text"] for choice in got)
    offsets = [offset for choice in got for offset in choice["specdec"]["text_offset"]]
    assert said == text
    assert sum(len(choice["specdec"]["kind"]) for choice in got) == len(ids) == len(offsets)
    assert "".join(text[start:end] for start, end in pairwise([*offsets, len(text)])) == text


async def test_a_part_of_a_character_is_told_of_too(bench: Bench) -> None:
    ids = bench.tokenizer.encode("🙂🙂")
    bench.script = lambda request: [
        TokenDelta((token,), Notes(provenance("p"), (0,)), "length" if i == len(ids) - 1 else None)
        for i, token in enumerate(ids)
    ]
    got = await choices(bench, **TOLD)
    assert [kind for choice in got for kind in choice["specdec"]["kind"]] == ["plain"] * len(ids)


async def test_without_a_stream_there_is_nothing_to_include(bench: Bench) -> None:
    async with client_of(bench) as http:
        answer = await http.post("/v1/completions", json=ASK | TOLD | {"stream": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
