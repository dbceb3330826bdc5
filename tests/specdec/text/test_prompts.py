from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.core.errors import InvalidParameterError
from specdec.text.prompts import check_token_ids, encode_text


def test_text_is_encoded_as_the_tokenizer_does(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode_text(demo_tokenizer, "def f():") == demo_tokenizer("def f():").input_ids


def test_an_empty_text_is_the_beginning_of_a_document(
    demo_tokenizer: PreTrainedTokenizerFast, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    assert encode_text(demo_tokenizer, "") == [demo_tokenizer.bos_token_id]
    with pytest.raises(InvalidParameterError, match="at least one token"):
        encode_text(tokenizers["wordpiece"], "")


def test_half_a_surrogate_pair_is_refused(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidParameterError, match="character 2"):
        encode_text(demo_tokenizer, "ab\ud83d")


@pytest.mark.parametrize("ids", [[], [-1], [0, 4096], [2**70]])
def test_token_ids_must_be_the_models(ids: list[int]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        check_token_ids(ids, 4096)
    assert caught.value.parameter == "prompt"
    check_token_ids([0, 4095], 4096)
