"""Fields without effect are taken, counted and logged once; what would change the answer is refused by name."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.http.schemas.fields import IGNORED, REFUSED, REFUSED_IN_COMPLETIONS, REFUSED_IN_MESSAGES, is_neutral
from deployments.http.service import ApiSettings

from .conftest import Bench

COMPLETION = {"model": "demo", "prompt": "x"}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
MATTERS = {"made to": "matter"}


async def noted(bench: Bench, http: httpx2.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> Counter:
    """What is counted of a body that is taken."""

    def counted() -> Counter:
        samples = [one for metric in bench.registry.collect() for one in metric.samples]
        name = "specdec_ignored_fields_total"
        return Counter({one.labels["field"]: int(one.value) for one in samples if one.name == name})

    before = counted()
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return counted() - before


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_without_effect_are_counted_at_every_level(
    bench: Bench, http: httpx2.AsyncClient, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    body = CHAT | {
        "messages": [{"role": "user", "content": [part], "colour": 1}, {"role": "user", "content": "x", "colour": 2}],
        "stream": stream,
        "store": True,
        "n_probs": 0.0,
        "best_of": None,
        "not yet invented\r\n": 1,
    }
    if stream:
        body["stream_options"] = {"include_everything": True}
    counts = await noted(bench, http, body, "/v1/chat/completions")
    assert counts == {"store": 1, "n_probs": 1, "other": 4 if stream else 3}, "colour is one, in both messages"
    for name in ("'messages.colour'", "'messages.content.cache_control'", r"'not yet invented\r\n'"):
        assert f"have the field {name}," in caplog.text


async def test_all_endpoints_with_a_body_count_them(bench: Bench, http: httpx2.AsyncClient) -> None:
    bodies = {"/v1/completions": COMPLETION, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]}}
    for path, body in bodies.items():
        assert await noted(bench, http, body, path) == {}
        assert await noted(bench, http, body | {"colour": None}, path) == {"other": 1}


async def test_they_are_counted_and_logged_once(
    bench: Bench, http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    for _ in range(3):
        await noted(bench, http, COMPLETION | {"colour": 1, "user": "me"})
    assert bench.metric("ignored_fields_total", field="user") == 3
    assert bench.metric("ignored_fields_total", field="other") == 3
    said = [record for record in caplog.records if "have the field 'colour'" in record.getMessage()]
    assert len({id(record) for record in said}) == 1, "once, whoever listens"


async def test_a_client_that_invents_names_fills_no_memory_and_hides_no_known_one(
    bench: Bench, http: httpx2.AsyncClient
) -> None:
    for i in range(20):
        assert await noted(bench, http, COMPLETION | {f"f{i}-{j}": 1 for j in range(40)}) == {"other": 32}
    series = [s for m in bench.registry.collect() if m.name == "specdec_ignored_fields" for s in m.samples]
    assert len([one for one in series if one.name.endswith("_total")]) == 1
    assert bench.metric("ignored_fields_total", field="other") == 20 * 32
    assert await noted(bench, http, COMPLETION | {"user": "me"}) == {"user": 1}


async def test_unknown_fields_can_be_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    bench = Bench(tokenizer, ApiSettings(unknown_fields="refuse"))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=bench.app), base_url="http://api") as http:
        assert await noted(bench, http, COMPLETION | {"user": "me", "best_of": 1}) == {"user": 1, "best_of": 1}
        answer = await http.post("/v1/completions", json=COMPLETION | {"colour": 1})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "colour", "unknown_parameter")
    assert len(bench.service.opened) == 1


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_what_would_change_the_answer_is_refused_unless_neutral(
    bench: Bench, http: httpx2.AsyncClient, refused: Callable[..., Any], name: str
) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        error = await refused(path, body | {name: MATTERS})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert name in error["message"]
        for value in (None, *REFUSED[name]):
            counts = await noted(bench, http, body | {name: value}, path)
            assert counts == ({} if value is None else {name: 1})


@pytest.mark.parametrize("name", sorted(REFUSED_IN_COMPLETIONS))
async def test_what_conversations_alone_have_is_refused_elsewhere(
    bench: Bench, http: httpx2.AsyncClient, refused: Callable[..., Any], name: str
) -> None:
    assert (await refused("/v1/completions", COMPLETION | {name: MATTERS}))["param"] == name
    for value in (None, *REFUSED_IN_COMPLETIONS[name]):
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            assert set(await noted(bench, http, body | {name: value}, path)) <= {name}


@pytest.mark.parametrize("name", sorted(REFUSED_IN_MESSAGES))
async def test_so_it_is_in_messages(refused: Callable[..., Any], name: str) -> None:
    message = {"role": "assistant", "content": "x", name: MATTERS}
    assert (await refused("/v1/chat/completions", CHAT | {"messages": [message]}))["param"] == f"messages[0].{name}"


async def test_taken_fields_may_hold_anything(bench: Bench, http: httpx2.AsyncClient) -> None:
    some = sorted(IGNORED)[:30]
    for value in (MATTERS, [1], "x", 0):
        assert set(await noted(bench, http, COMPLETION | dict.fromkeys(some, value))) == set(some)
    assert await noted(bench, http, COMPLETION | dict.fromkeys(IGNORED)) == {}


@pytest.mark.parametrize(
    ("value", "neutral", "expected"),
    [(None, (), True), (1.0, (1,), True), (True, (1,), False), (0, (False,), False), ("", ([],), False)],
)
def test_neutral_values(value: Any, neutral: tuple[Any, ...], expected: bool) -> None:
    assert is_neutral(value, neutral) == expected
