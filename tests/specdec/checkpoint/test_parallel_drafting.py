"""What a configuration says of drafting several tokens in a pass."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from specdec.checkpoint.parallel_drafting import ONE_TOKEN, StepTokens, step_tokens
from specdec.core.errors import ModelLoadError

PARD = {"pard_token": 4000, "spd_type": "pard"}


def found(wanted: int, **fields: Any) -> StepTokens:
    return step_tokens(LlamaConfig(vocab_size=4096, **fields), "a draft", wanted)


@pytest.mark.parametrize("fields", [PARD, {"ptd_token_id": 4000}])
def test_a_pass_gives_as_many_tokens_as_are_wanted(fields: dict[str, Any]) -> None:
    assert found(8, **fields) == StepTokens(8, 4000)
    assert found(13, **fields) == StepTokens(12, 4000), "a draft of 12 is one pass"
    assert found(1) == ONE_TOKEN


def test_a_pass_gives_no_more_tokens_than_it_was_taught() -> None:
    assert found(5, para_num=4, **PARD) == StepTokens(4, 4000)
    long = found(17, para_num=8, **PARD)
    assert long.count == 8
    assert long.notes == ("a pass gives 8 tokens, as a draft was taught; drafts of up to 16 take several passes",)
    assert "names no para_num; drafts of up to 16 take several passes" in found(17, **PARD).notes[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"a draft gives a token a pass: its config\.json names no mask token \(pard_token or ptd_token_id\)"),
        ({"pard_token": -1, "spd_type": "pard"}, "names no mask token"),
        ({"pard_token": 4096}, r"the mask token of a draft must be in \[0, 4096\), not 4096"),
        ({"pard_token": "<mask>"}, r"must be in \[0, 4096\), not <mask>"),
        (PARD | {"para_num": 0}, "para_num of a draft must be at least 1, not 0"),
    ],
)
def test_what_cannot_give_several_tokens_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        found(8, **fields)
    assert found(1, **fields).count == 1, "token by token all of them draft"
