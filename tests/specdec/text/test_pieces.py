from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.text.detokenizer import TokenTexts


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_the_bytes_of_the_tokens_are_those_of_the_text(
    tokenizers: dict[str, PreTrainedTokenizerFast], name: str
) -> None:
    tokenizer = tokenizers[name]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("the sunset 日本 🙂 is\nok", add_special_tokens=False)
    written = b"".join(texts.utf8(token) for token in ids).decode()
    assert written.removeprefix(" ") == "the sunset 日本 🙂 is\nok"


def test_a_token_that_is_no_text_is_written_by_its_bytes(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenTexts(demo_tokenizer)
    smile = demo_tokenizer.encode("🙂")
    assert texts.text(smile[0]).startswith("bytes:\\xf0")
    assert len({texts.text(token) for token in smile}) == len(smile)


def test_a_word_keeps_its_space_and_a_special_token_its_name(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    texts = TokenTexts(tokenizer)
    assert texts.text(tokenizer.convert_tokens_to_ids("▁sun")) == " sun"
    assert texts.text(tokenizer.convert_tokens_to_ids("</s>")) == "</s>"
