"""Services whose drafts are looked up: without a draft model, and before one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.running import RunningService, eventually

COMPLETION = {"prompt": "x = 1\nx = 1\nx = 1\nx = 1\n", "max_tokens": 40, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "def f(a):"}], "max_tokens": 60, "temperature": 1, "seed": 3}


def accepted(running: RunningService) -> tuple[float, float]:
    """Accepted draft tokens, and those of them that were looked up in the text or in a prediction."""
    found = [running.count("accepted_tokens_by_source", f'source="{source}"') for source in ("ngram", "prediction")]
    return running.count("spec_decode_num_accepted_tokens"), sum(found)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningService]:
    service = RunningService("--draft-method", "ngram")
    yield service
    assert service.stop() == 0


def test_drafts_are_looked_up_and_change_no_token(running: RunningService) -> None:
    client = running.client()
    assert len(client.models.list().data) == 1
    texts = {
        client.completions.create(
            model=running.model, extra_body={"ignore_eos": True, "num_speculative_tokens": bound}, **COMPLETION
        )
        .choices[0]
        .text
        for bound in (0, 3, None)
    }
    assert len(texts) == 1
    eventually(lambda: accepted(running)[1] > 0, 30, "accepted tokens that were looked up")
    assert running.count("spec_decode_num_accepted_tokens") > 0


def test_a_prediction_that_is_right_is_accepted(running: RunningService) -> None:
    client = running.client()

    def answer(**fields: Any) -> Any:
        return client.chat.completions.create(model=running.model, **CHAT, **fields)

    plain = answer(extra_body={"num_speculative_tokens": 0}).choices[0].message.content
    told = answer(prediction={"type": "content", "content": plain})
    assert told.choices[0].message.content == plain
    assert told.usage.completion_tokens_details.accepted_prediction_tokens > told.usage.completion_tokens / 2


@pytest.fixture(scope="module")
def with_both() -> Iterator[RunningService]:
    service = RunningService("--draft-method", "ngram+model", "--num-speculative-tokens", "4")
    yield service
    assert service.stop() == 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_with_a_draft_model_as_well_both_draft_and_change_no_token(
    with_both: RunningService, temperature: float
) -> None:
    """Half of an answer is predicted: the draft model drafts the rest."""
    client = with_both.client()
    before = accepted(with_both)

    def answer(seed: int, **fields: Any) -> str:
        asked: dict[str, Any] = {**CHAT, "temperature": temperature, "seed": seed, **fields}
        told = client.chat.completions.create(model=with_both.model, **asked)
        return told.choices[0].message.content or ""

    for seed in range(3):
        plain = answer(seed, extra_body={"num_speculative_tokens": 0})
        predicted = {"type": "content", "content": plain[: len(plain) // 2]}
        assert [answer(seed), answer(seed, prediction=predicted)] == [plain, plain]

    def since() -> tuple[float, float]:
        now = accepted(with_both)
        return now[0] - before[0], now[1] - before[1]

    eventually(lambda: since()[1] > 0, 60, "accepted tokens that were looked up")
    eventually(
        lambda: since()[0] > since()[1],
        60,
        "accepted tokens of the draft model",
    )
