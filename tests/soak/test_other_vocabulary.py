"""A service whose draft model has a vocabulary of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.running import RunningService, eventually
from tests.specdec.vocabularies import DRAFT, save_smaller


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    draft = save_smaller(tmp_path_factory.mktemp("models") / "draft")
    models = ("--target", str(DRAFT.parent / "target"), "--draft", str(draft), "--draft-other-vocabulary")
    service = RunningService(*models, "--num-speculative-tokens", "4", "--speculation-mode", "outcomes")
    yield service
    assert service.stop() == 0


def test_drafts_change_no_token(running: RunningService) -> None:
    client = running.client()
    for temperature in (0, 1):
        texts = {
            client.completions.create(
                model=running.model,
                prompt="def read_file(path):\n",
                max_tokens=60,
                temperature=temperature,
                seed=7,
                extra_body={"ignore_eos": True, "num_speculative_tokens": bound},
            )
            .choices[0]
            .text
            for bound in (0, 4)
        }
        assert len(texts) == 1
    eventually(lambda: running.count("spec_decode_num_accepted_tokens") > 20, 30, "accepted tokens")


def test_the_draft_model_cannot_be_asked_by_itself(running: RunningService) -> None:
    assert [model.id for model in running.client().models.list().data] == [running.model]
