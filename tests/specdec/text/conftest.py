from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["▁", "▁the", "▁sun", "s", "et", "▁is", "▁ok", "a", "é", ".", ",", "▁▁", "\n"]


def _byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: spaces are U+2581, and bytes outside the vocabulary are tokens of their own."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _metaspace() -> PreTrainedTokenizerFast:
    """As T5: one piece per word, the first without its space."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], 0))
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")


def _wordpiece() -> PreTrainedTokenizerFast:
    """As BERT: spaces between words, none before what goes on with a word."""
    names = ["[UNK]", "[SEP]", "the", "sun", "##s", "##et", "is", "ok", ".", ",", "é"]
    backend = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([AddedToken("[SEP]", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="[SEP]", unk_token="[UNK]")


@pytest.fixture(scope="session")
def tokenizers(demo_tokenizer: PreTrainedTokenizerFast) -> dict[str, PreTrainedTokenizerFast]:
    return {
        "byte_level": demo_tokenizer,
        "byte_fallback": _byte_fallback(),
        "metaspace": _metaspace(),
        "wordpiece": _wordpiece(),
    }


@pytest.fixture
def tokenizer_named(tokenizers: dict[str, PreTrainedTokenizerFast]) -> Callable[[str], PreTrainedTokenizerFast]:
    return tokenizers.__getitem__
