from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import specdec.demo
from specdec.checkpoint.compat import check_pair
from specdec.core.errors import IncompatiblePairError
from specdec.models.loading import LoadedModel, ModelSource, load_model, load_tokenizer

DRAFT = ModelSource(str(Path(specdec.demo.__path__[0]) / "draft"), device="cpu")
TARGET = ModelSource(str(Path(specdec.demo.__path__[0]) / "target"), device="cpu")


@pytest.fixture(scope="module")
def draft() -> LoadedModel:
    return load_model(DRAFT)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(DRAFT)


def test_the_demo_pair_fits(draft: LoadedModel) -> None:
    report = check_pair(load_model(TARGET), load_tokenizer(TARGET), draft, load_tokenizer(DRAFT))
    assert report.vocab_size == 4096
    assert report.draft_max_model_len == 2048
    assert report.notes == ()


def test_padding_and_a_shorter_draft_are_notes(draft: LoadedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    short = replace(draft, max_model_len=512, vocab_size=4352)
    report = check_pair(draft, tokenizer, short, tokenizer)
    assert report.draft_max_model_len == 512
    assert report.vocab_size == 4096
    assert "the draft reads 512 tokens, the target 2048" in report.notes[0]
    assert "the draft's logits are padded from 4096 to 4352" in report.notes[1]


def test_logits_narrower_than_the_vocabulary_are_refused(
    draft: LoadedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(IncompatiblePairError, match=r"the target .* has 4000 logits, .* up to 4095"):
        check_pair(replace(draft, vocab_size=4000), tokenizer, draft, tokenizer)


def test_the_first_token_that_differs_is_named(draft: LoadedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    longer = load_tokenizer(DRAFT)
    longer.add_tokens(["<first>", "<second>"])
    with pytest.raises(
        IncompatiblePairError, match=r"token 4096 is nothing for the target and '<first>' for the draft"
    ):
        check_pair(draft, tokenizer, draft, longer)
    other = load_tokenizer(DRAFT)
    other.add_tokens(["<other>"])
    with pytest.raises(IncompatiblePairError, match=r"token 4096 is '<other>' for the target and '<first>'"):
        check_pair(draft, other, draft, longer)


def test_special_tokens_must_agree_but_for_padding(draft: LoadedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    token = tokenizer.convert_ids_to_tokens(300)
    other = load_tokenizer(DRAFT)
    other.pad_token = other.eos_token
    assert check_pair(draft, tokenizer, draft, other).vocab_size == 4096
    assert check_pair(draft, other, draft, tokenizer).vocab_size == 4096
    other.eos_token = token
    with pytest.raises(
        IncompatiblePairError, match=r"eos_token is '<\|endoftext\|>' for the target and .* for the draft"
    ):
        check_pair(draft, tokenizer, draft, other)


def test_a_token_special_for_one_side_only_is_named(draft: LoadedModel) -> None:
    target, other = load_tokenizer(DRAFT), load_tokenizer(DRAFT)
    target.add_tokens([AddedToken("<tool>", special=True)], special_tokens=True)
    other.add_tokens([AddedToken("<tool>", special=False)])
    wide = replace(draft, vocab_size=4352)
    with pytest.raises(IncompatiblePairError, match="token 4096, '<tool>', is special for the target only"):
        check_pair(wide, target, wide, other)
