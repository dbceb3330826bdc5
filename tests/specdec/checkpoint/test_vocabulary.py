"""Tokens of one vocabulary in another."""

from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from specdec.checkpoint.compat import VocabularyMapping, check_pair, map_vocabularies
from specdec.core.errors import IncompatiblePairError
from specdec.engine.drafter import VocabularyMapper
from specdec.models.describe import describe_model, describe_pair
from specdec.models.loading import ModelSource, load_tokenizer
from tests.specdec.checkpoints import save_checkpoint
from tests.specdec.operators import Operators
from tests.specdec.vocabularies import DRAFT, save_shuffled, save_smaller

SPECIAL = (0, 1, 2)
NO_TEXT = 190
"""The token of byte 255, which no text holds."""


def tokens(end: int, *without: int) -> list[int]:
    return [i for i in range(end) if i not in (NO_TEXT, *without)]


@pytest.fixture(scope="module")
def target() -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelSource(str(DRAFT)))


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelSource(str(save_shuffled(tmp_path_factory.mktemp("draft") / "shuffled"))))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelSource(str(save_smaller(tmp_path_factory.mktemp("draft") / "smaller"))))


def read(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    """The tokens' own spelling, in which every byte is a letter."""
    return "".join(tokenizer.convert_ids_to_tokens([*ids]))


def test_the_same_tokens_in_another_order_are_all_found(
    target: PreTrainedTokenizerFast, shuffled: PreTrainedTokenizerFast
) -> None:
    mapping = map_vocabularies(target, shuffled)
    assert mapping.shared.tolist() == tokens(4096)
    assert mapping.shared_in_draft.tolist() != tokens(4096)
    assert all(read(shuffled, mapping.spelled[i]) == read(target, (i,)) for i in tokens(4096))


def test_tokens_that_the_draft_lacks_are_spelled_in_pieces(
    target: PreTrainedTokenizerFast, smaller: PreTrainedTokenizerFast
) -> None:
    mapping = map_vocabularies(target, smaller)
    assert mapping.shared.tolist() == mapping.shared_in_draft.tolist() == tokens(1500)
    assert all(read(smaller, mapping.spelled[i]) == read(target, (i,)) for i in tokens(4096))
    assert all(len(ids) > 1 for ids in mapping.spelled[1500:])
    assert [mapping.spelled[i] for i in SPECIAL] == [(i,) for i in SPECIAL]


def test_logits_stand_where_the_target_has_them(
    target: PreTrainedTokenizerFast, shuffled: PreTrainedTokenizerFast, smaller: PreTrainedTokenizerFast
) -> None:
    logits = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    mapping = map_vocabularies(target, shuffled)
    moved = VocabularyMapper(mapping).logits(logits)
    for i in (0, 5, 4095):
        assert torch.equal(moved[:, i], logits[:, mapping.spelled[i][0]])
    few = VocabularyMapper(map_vocabularies(target, smaller)).logits(logits[:, :1500])
    assert few.shape == (3, 4096)
    assert few[:, 1500:].max() < few[:, tokens(1500)].min() - 1000


def test_the_maps_are_uploaded_once(target: PreTrainedTokenizerFast, shuffled: PreTrainedTokenizerFast) -> None:
    mapping = map_vocabularies(target, shuffled)
    mapper, logits = VocabularyMapper(mapping), torch.empty(2, 4096, device="meta")
    with Operators() as first:
        mapper.logits(logits)
    with Operators() as later:
        mapper.logits(logits)
    assert first.names.count("aten._to_copy.default") == 2
    assert "aten._to_copy.default" not in later.names


def test_ends_of_text_are_one_another_whatever_they_are_called(
    target: PreTrainedTokenizerFast, shuffled: PreTrainedTokenizerFast
) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=shuffled.backend_tokenizer, eos_token="<|im_end|>")
    mapping = map_vocabularies(target, other)
    assert mapping.spelled[target.eos_token_id] == (other.eos_token_id,) == (2,)
    assert mapping.shared.tolist() == tokens(4096, 2), "one token of the draft's is one of the target's"


def test_a_draft_that_begins_every_text_with_a_token_begins_these_with_it(
    target: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    other = load_tokenizer(ModelSource(str(save_smaller(tmp_path / "draft"))))
    assert map_vocabularies(target, other).beginning == ()
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert map_vocabularies(target, other).beginning == (0,)
    assert map_vocabularies(other, other).beginning == (), "the target's tokenizer has written it already"


def test_vocabularies_with_hardly_a_token_in_common_are_refused(
    target: PreTrainedTokenizerFast, smaller: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    few = load_tokenizer(ModelSource(str(save_smaller(tmp_path / "few", num_tokens=300))))
    with pytest.raises(IncompatiblePairError, match=r"299 of the target's 4096 tokens in common: at least 10% are"):
        map_vocabularies(target, few)
    assert isinstance(map_vocabularies(smaller, few), VocabularyMapping)


def test_a_pair_of_two_vocabularies_fits_only_where_that_is_asked_for(tmp_path: Path) -> None:
    own, other = ModelSource(str(DRAFT)), ModelSource(str(save_smaller(tmp_path / "draft")))
    with pytest.raises(IncompatiblePairError, match=r"draft: the vocabularies differ: .*; see draft\.other_vocabulary"):
        describe_pair(own, other)
    report = describe_pair(own, other, other_vocabulary=True)
    assert (report.vocab_size, report.draft_vocab_size, report.num_shared_tokens) == (4096, 1500, 1499)
    assert "of the target's 4096 tokens the draft has 1499" in report.notes[0]
    assert describe_pair(own, own, other_vocabulary=True).mapping is None


def test_a_draft_narrower_than_its_own_vocabulary_is_refused(tmp_path: Path) -> None:
    own, other = ModelSource(str(DRAFT)), ModelSource(str(save_smaller(tmp_path / "draft")))
    narrow = describe_model(ModelSource(str(save_checkpoint(tmp_path / "narrow"))))
    with pytest.raises(IncompatiblePairError, match=r"the draft .* has 16 logits, .* up to 1499"):
        check_pair(describe_model(own), load_tokenizer(own), narrow, load_tokenizer(other), other_vocabulary=True)
