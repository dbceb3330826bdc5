"""A service without a draft model, whose drafts are made by heads on the target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.running import RunningService, eventually

COMPLETION = {"prompt": "def read_lines(path):\n", "max_tokens": 40}


@pytest.fixture(scope="module")
def running() -> Iterator[RunningService]:
    service = RunningService("--draft-method", "medusa", "--draft-tree-tokens", "12")
    yield service
    assert service.stop() == 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_heads_draft_and_change_no_token(running: RunningService, temperature: int) -> None:
    client = running.client()
    assert len(client.models.list().data) == 1
    texts = {
        client.completions.create(
            model=running.model,
            temperature=temperature,
            seed=3,
            extra_body={"ignore_eos": True, "num_speculative_tokens": bound},
            **COMPLETION,
        )
        .choices[0]
        .text
        for bound in (0, 2, None)
    }
    assert len(texts) == 1
    eventually(lambda: running.count("accepted_tokens_by_source", 'source="heads"') > 0, 30, "accepted tokens of heads")
