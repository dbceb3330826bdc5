"""OpenAI's Predicted Outputs: what travels with the sequence, and what the usage says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from deployments.http.tally import RoundTally
from specdec.core.messages import Notes
from specdec.core.tokens import NO_TOKENS
from specdec.protocol.ingress import TokenDelta
from tests.letters import provenance

from .conftest import MAX_MODEL_LEN, TEXT, Bench

MESSAGES = [{"role": "user", "content": "Rename b."}]
PARTS = [{"type": "text", "text": TEXT[:20]}, {"type": "text", "text": TEXT[20:]}]


@pytest.mark.parametrize("content", [TEXT, PARTS])
async def test_its_tokens_travel_with_every_sequence_and_the_usage_tells(
    bench: Bench, client: AsyncOpenAI, content: Any
) -> None:
    ids = bench.tokenizer.encode("def add")
    notes = Notes(provenance("x" * (len(ids) - 1) + "y"), (*[0] * (len(ids) - 1), 5))
    bench.script = lambda request: [TokenDelta(tuple(ids), notes, finish="length")]
    answer = await client.chat.completions.create(
        model="demo", messages=MESSAGES, n=2, prediction={"type": "content", "content": content}
    )
    wanted = bench.tokenizer.encode(TEXT, add_special_tokens=False)[:MAX_MODEL_LEN]
    first, second = (request.spec.prediction for request in bench.service.opened[-2:])
    assert list(first) == wanted
    assert second is first, "the samples share it"
    details = answer.usage.completion_tokens_details
    kept = len(ids) - 1
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2 * kept, 2 * (5 - kept))


async def test_a_stream_tells_it_with_its_usage(bench: Bench, client: AsyncOpenAI) -> None:
    bench.says("def add")
    stream = await client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        prediction={"type": "content", "content": TEXT},
        stream=True,
        stream_options={"include_usage": True},
    )
    last = [chunk async for chunk in stream][-1]
    details = last.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


async def test_without_one_the_usage_says_nothing_and_without_drafts_none_travels(
    bench: Bench, http: httpx2.AsyncClient
) -> None:
    bench.says("def add")
    body = {"model": "demo", "messages": MESSAGES}
    answer = await http.post("/v1/chat/completions", json=body)
    assert "completion_tokens_details" not in answer.json()["usage"]
    prediction = {"type": "content", "content": TEXT}
    for fields in ({"num_speculative_tokens": 0}, {"disable_spec_decode": True}):
        answer = await http.post("/v1/chat/completions", json=body | {"prediction": prediction} | fields)
        assert answer.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
        assert bench.service.opened[-1].spec.prediction == NO_TOKENS
    long = {"type": "content", "content": TEXT * 50}
    await http.post("/v1/chat/completions", json=body | {"prediction": long})
    assert len(bench.service.opened[-1].spec.prediction) == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("def add", "prediction"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {}}]}, "prediction.content[0].type"),
    ],
)
async def test_what_is_none_is_refused(refused: Callable[..., Any], prediction: Any, param: str) -> None:
    error = await refused("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "prediction": prediction})
    assert error["param"] == param


def test_rounds_are_told_apart_by_where_their_drafts_are_from() -> None:
    tally = RoundTally()
    rounds = [
        *tally.add(Notes(provenance("aacxx"), (0, 0, 4, 0, 0))),
        *tally.add(Notes(provenance("xyAC"), (0, 6, 0, 2))),
    ]
    assert [tuple(one) for one in rounds] == [(4, 2), (6, 3), (2, 1)]
    assert (tally.num_predicted, tally.num_mispredicted) == (3, 3)
