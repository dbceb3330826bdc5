"""A draft model of another vocabulary: what each token of the target is in the draft's own.

Only tokens that both have are drafted, after the token-level intersection of Timor et al. 2025, "Accelerating LLM
Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies". Whatever the draft reads, the
target decides: nothing here touches the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from specdec.core.errors import IncompatiblePairError
from specdec.core.types import Tokens

_LEAST_SHARE = 0.1
"""Of the target's tokens, how many a draft must have, or it could hardly ever say what the target says."""


@dataclass(frozen=True, slots=True)
class VocabularyMapping:
    """What each token of a target is to a draft model of another vocabulary.

    Attributes:
        spelled: Per token id of the target, the draft's token ids of the same text: one where it has the token.
        beginning: What the draft's tokenizer puts before every text, where the target's puts nothing.
        shared: int64 [number of shared tokens], their ids in the target's vocabulary, ascending.
        shared_in_draft: int64 [number of shared tokens], the same tokens' ids in the draft's.
    """

    spelled: tuple[Tokens, ...]
    beginning: Tokens
    shared: np.ndarray[Any, np.dtype[np.int64]]
    shared_in_draft: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def vocab_size(self) -> int:
        """Width of the target's vocabulary."""
        return len(self.spelled)


def map_vocabularies(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> VocabularyMapping:
    """Find what each token of a target is in a draft's vocabulary.

    Special tokens are the same where they read the same, or where both begin or end a text.

    Raises:
        IncompatiblePairError: A tokenizer's tokens cannot be read as bytes, or the two have hardly a token in common.
    """
    ours, theirs = _Bytes.of(target, "target"), _Bytes.of(draft, "draft")
    by_text: dict[tuple[bool, bytes], int] = {}
    for i, text in enumerate(theirs.texts):
        by_text.setdefault(text, i)
    same: dict[int, int] = {}
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(target, name) is not None and getattr(draft, name) is not None:
            same[getattr(target, name)] = getattr(draft, name)
    for i, text in enumerate(ours.texts):
        if text[1] and text in by_text:
            same.setdefault(i, by_text[text])
    one_each: dict[int, int] = {}
    for i, in_draft in same.items():
        one_each.setdefault(in_draft, i)
    if len(one_each) < _LEAST_SHARE * len(ours.texts):
        raise IncompatiblePairError(
            f"the target and the draft have {len(one_each)} of the target's {len(ours.texts)} tokens in common: "
            f"at least {_LEAST_SHARE:.0%} are needed"
        )
    fallback = (draft.eos_token_id or 0,)
    spelled = tuple(
        (same[i],) if i in same else tuple(theirs.tokenizer.tokenize_bytes(text[1])) or fallback
        for i, text in enumerate(ours.texts)
    )
    pairs = sorted((i, in_draft) for in_draft, i in one_each.items())
    shared, shared_in_draft = np.ascontiguousarray(np.array(pairs, np.int64).T)
    beginning = () if target("").input_ids else tuple(draft("").input_ids)
    return VocabularyMapping(spelled, beginning, shared, shared_in_draft)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tokenizer by its bytes; per token id whether it is special, and its bytes."""

    tokenizer: LLTokenizer
    texts: tuple[tuple[bool, bytes], ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, role: str) -> _Bytes:
        try:
            read = from_tokenizer(tokenizer)
        except ValueError as error:
            raise IncompatiblePairError(f"the tokens of the {role} cannot be read as bytes: {error}") from error
        ids = range(read.vocab_size)
        return cls(read, tuple((read.is_special_token(i), read.decode_bytes([i])) for i in ids))
