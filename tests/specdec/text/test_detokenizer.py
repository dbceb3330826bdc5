from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.text.detokenizer import Detokenizer, special_token_ids

NAMES = ["byte_level", "byte_fallback", "metaspace", "wordpiece"]
TEXT = "the sunset … naïve 日本語 🙂👩‍👩‍👧 is ok.\n\n  the end"
Get = Callable[[str], PreTrainedTokenizerFast]


def whole(tokenizer: PreTrainedTokenizerFast, ids: list[int], skip: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def random_ids(tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> list[int]:
    """Any tokens, most of them no sense; where a decoder spoils whole runs of bytes, no bytes."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    ids = [i for i, name in enumerate(names) if not name.startswith("<0x")]
    return random.Random(seed).choices(ids, k=count)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_pieces_are_the_decoded_whole(tokenizer_named: Get, name: str, skip: bool) -> None:
    tokenizer = tokenizer_named(name)
    for seed in range(30):
        ids = random_ids(tokenizer, 120, seed)
        assert "".join(pieces(tokenizer, ids, skip)) == whole(tokenizer, ids, skip)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_several_tokens_at_once_give_what_they_give_one_by_one(tokenizer_named: Get, name: str, skip: bool) -> None:
    """Bytes included, of which runs that are no text are spoilt; and so are prompts that end within a character."""
    tokenizer = tokenizer_named(name)
    sensible = tokenizer.encode(TEXT, add_special_tokens=False)
    for seed in range(60):
        drawn = random.Random(seed)
        ids = drawn.choices(range(len(tokenizer)), k=20) + sensible * 2 + drawn.choices(range(len(tokenizer)), k=20)
        start = drawn.randrange(0, 50)
        one, other = (Detokenizer(tokenizer, ids[:start], skip_special_tokens=skip) for _ in range(2))
        while start < len(ids):
            some = ids[start : start + drawn.randrange(1, 7)]
            assert other.push_all(some) == "".join(one.push(token) for token in some)
            start += len(some)
        assert other.finish() == one.finish()


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_no_piece_has_half_a_character(tokenizer_named: Get, name: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) > len(TEXT.split())
    got = pieces(tokenizer, ids)
    assert "".join(got) == TEXT
    assert not any("\ufffd" in piece for piece in got)
    assert got[-1] == ""


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_character_is_given_with_its_last_byte(tokenizer_named: Get, name: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode("a🙂", add_special_tokens=False)
    got = pieces(tokenizer, ids)
    assert got[-2:] == ["🙂", ""]
    assert [piece for piece in got if piece] == ["a", "🙂"]


def test_bytes_that_are_no_text_are_given_as_replacements(tokenizer_named: Get) -> None:
    tokenizer = tokenizer_named("byte_level")
    smile = tokenizer.encode("🙂")
    for ids in (smile[:2], smile[:2] + tokenizer.encode("ok"), smile[1:2] * 50, smile[1:2] * 50 + smile):
        assert "".join(pieces(tokenizer, ids)) == whole(tokenizer, ids)


def test_what_was_given_stands_where_a_later_byte_spoils_the_run(tokenizer_named: Get) -> None:
    tokenizer = tokenizer_named("byte_fallback")
    ids = tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "<0xFF>", "▁ok"])
    assert whole(tokenizer, ids) == "a\ufffd\ufffd ok"
    assert "".join(pieces(tokenizer, ids)) == "a\n\ufffd ok"


@pytest.mark.parametrize("name", NAMES)
def test_a_token_costs_the_same_however_long_the_text_is(
    tokenizer_named: Get, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_named(name)
    decode, lengths = tokenizer.decode, []

    def measured(ids: list[int], **options: bool) -> str:
        lengths.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", measured)
    pieces(tokenizer, random_ids(tokenizer, 1000, 0))
    pieces(tokenizer, tokenizer.encode("🙂", add_special_tokens=False)[:1] * 1000)
    assert max(lengths) <= 32
    assert len(lengths) <= 3 * 2000


def test_special_tokens_do_not_swallow_the_space_after_them(tokenizer_named: Get) -> None:
    tokenizer = tokenizer_named("byte_fallback")
    ids = tokenizer.convert_tokens_to_ids(["<s>", "▁the", *["</s>"] * 40, "▁sun"])
    assert special_token_ids(tokenizer) == {0, 1, 2}
    assert "".join(pieces(tokenizer, ids)) == "the sun"


def test_after_a_prompt_the_first_word_keeps_its_space(tokenizer_named: Get) -> None:
    tokenizer = tokenizer_named("byte_fallback")
    prompt = tokenizer.convert_tokens_to_ids(["<s>", "▁the"])
    detokenizer = Detokenizer(tokenizer, prompt)
    assert detokenizer.push(tokenizer.convert_tokens_to_ids("▁sun")) == " sun"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_prompt_may_end_in_half_a_character(tokenizer_named: Get, name: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode("a🙂", add_special_tokens=False)
    for cut in (2, 3):
        detokenizer = Detokenizer(tokenizer, ids[:-cut])
        assert "".join(detokenizer.push(token) for token in ids[-cut:]) == "🙂"
        assert detokenizer.finish() == ""
        for text in ("a", ""):
            other = tokenizer.encode(text, add_special_tokens=False)[-1:]
            detokenizer = Detokenizer(tokenizer, ids[:-cut])
            said = "".join(detokenizer.push(token) for token in other) + detokenizer.finish()
            assert said == whole(tokenizer, other).lstrip()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 5])
def test_ids_without_text_do_not_make_the_window_grow(
    tokenizer_named: Get, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids beyond the tokenizer's, which padded embeddings have, decode to nothing."""
    tokenizer = tokenizer_named(name)
    sensible = tokenizer.encode(TEXT, add_special_tokens=False)
    ids = [*sensible, *[len(tokenizer) + 5] * 400, *sensible]
    num_decoded, decode = list[int](), Detokenizer._decode

    def counted(self: Detokenizer, tokens: list[int]) -> str:
        num_decoded.append(len(tokens))
        return decode(self, tokens)

    monkeypatch.setattr(Detokenizer, "_decode", counted)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push_all(ids[start : start + size]) for start in range(0, len(ids), size))
    assert text + detokenizer.finish() == whole(tokenizer, ids)
    assert max(num_decoded) <= 40
