"""Whether a model has a logit for all of its tokens, and a target and a draft speak the same.

Where they do not, each token of the target is mapped to what it is in the draft's vocabulary. Only tokens that both
have are drafted, after the token-level intersection of Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies". Whatever the draft reads, the target decides: nothing
here touches the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from specdec.checkpoint.parallel_drafting import ONE_TOKEN, StepTokens
from specdec.core.errors import IncompatiblePairError, ModelLoadError
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


_SPECIAL = ("bos_token", "eos_token", "unk_token")


class PairMember(Protocol):
    """What counts of a model in a pair; a loaded model has it, and so has its description."""

    @property
    def name(self) -> str:
        """As the user gave it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of its logits, padding included."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens."""
        ...


@dataclass(frozen=True, slots=True)
class PairReport:
    """What holds for a pair that fits together.

    Attributes:
        vocab_size: Width that the target's logits are cut to: one more than its highest token id.
        draft_vocab_size: The same for the draft's.
        num_shared_tokens: Tokens that mean the same to both.
        draft_max_model_len: Sequences longer than this are decoded without drafts.
        notes: What differs without harm, a sentence each.
        mapping: Between the two vocabularies, where the draft has another.
        step_tokens: How many tokens the draft gives in a pass.
    """

    vocab_size: int
    draft_vocab_size: int
    num_shared_tokens: int
    draft_max_model_len: int
    notes: tuple[str, ...] = ()
    mapping: VocabularyMapping | None = None
    step_tokens: StepTokens = ONE_TOKEN


def tokenizer_width(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of token ids a tokenizer spans: one more than its highest. There may be gaps below it."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_width(name: str, num_logits: int, width: int) -> None:
    """Check that a model has a logit for every token id of its tokenizer.

    Args:
        name: Of the model, for the message.
        num_logits: Width of its logits.
        width: Of the tokenizer, as :func:`tokenizer_width` says.

    Raises:
        ModelLoadError: The model is narrower.
    """
    if num_logits < width:
        raise ModelLoadError(f"{name} has {num_logits} logits, but its tokenizer has token ids up to {width - 1}")


def check_pair(
    target: PairMember,
    target_tokenizer: PreTrainedTokenizerBase,
    draft: PairMember,
    draft_tokenizer: PreTrainedTokenizerBase,
    *,
    other_vocabulary: bool = False,
) -> PairReport:
    """Check that a draft's tokens mean the same to the target, or can be mapped.

    Args:
        target: The model whose output is served.
        target_tokenizer: Its tokenizer.
        draft: The model that proposes.
        draft_tokenizer: Its tokenizer.
        other_vocabulary: Whether the draft may have another vocabulary: then tokens that both have are drafted.

    Raises:
        IncompatiblePairError: naming the first difference.
    """
    notes = _length_notes(target, draft)
    mapping = None
    try:
        _check_vocabulary(target_tokenizer.get_vocab(), draft_tokenizer.get_vocab())
        _check_special_tokens(target_tokenizer, draft_tokenizer)
    except IncompatiblePairError as error:
        if not other_vocabulary:
            raise IncompatiblePairError(f"{draft.name}: {error}; see draft.other_vocabulary") from None
        mapping = map_vocabularies(target_tokenizer, draft_tokenizer)
        notes.append(
            f"the vocabularies differ: of the target's {mapping.vocab_size} tokens the draft has "
            f"{len(mapping.shared)}, and only those are drafted"
        )
    vocab_size = draft_vocab_size = tokenizer_width(target_tokenizer)
    num_shared_tokens = len(target_tokenizer)
    if mapping is not None:
        draft_vocab_size, num_shared_tokens = tokenizer_width(draft_tokenizer), len(mapping.shared)
    for what, model, width in (("target", target, vocab_size), ("draft", draft, draft_vocab_size)):
        if model.vocab_size < width:
            raise IncompatiblePairError(
                f"the {what} {model.name} has {model.vocab_size} logits, but its vocabulary goes up to {width - 1}"
            )
        if model.vocab_size > width:
            notes.append(f"the {what}'s logits are padded from {width} to {model.vocab_size}; the padding is cut")
    draft_max_model_len = min(target.max_model_len, draft.max_model_len)
    return PairReport(vocab_size, draft_vocab_size, num_shared_tokens, draft_max_model_len, tuple(notes), mapping)


def _check_vocabulary(target: dict[str, int], draft: dict[str, int]) -> None:
    if target == draft:
        return
    target_tokens = {token_id: token for token, token_id in target.items()}
    draft_tokens = {token_id: token for token, token_id in draft.items()}
    differing = (i for i in target_tokens.keys() | draft_tokens.keys() if target_tokens.get(i) != draft_tokens.get(i))
    first = min(differing)
    raise IncompatiblePairError(
        f"the vocabularies differ: token {first} is {_shown(target_tokens.get(first))} for the target and "
        f"{_shown(draft_tokens.get(first))} for the draft ({len(target)} and {len(draft)} tokens in all)"
    )


def _check_special_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    for name in _SPECIAL:
        ours, theirs = getattr(target, name), getattr(draft, name)
        if ours != theirs:
            raise IncompatiblePairError(f"{name} is {_shown(ours)} for the target and {_shown(theirs)} for the draft")
    # Padding is left out: nothing here is padded.
    padding = {target.pad_token_id, draft.pad_token_id}
    differing = (_special_ids(target) ^ _special_ids(draft)) - padding
    if differing:
        first = min(differing)
        where = "target" if first in _special_ids(target) else "draft"
        token = _shown(target.convert_ids_to_tokens(first))
        raise IncompatiblePairError(f"token {first}, {token}, is special for the {where} only")


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that never stand for text."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _length_notes(target: PairMember, draft: PairMember) -> list[str]:
    if draft.max_model_len >= target.max_model_len:
        return []
    return [
        f"the draft reads {draft.max_model_len} tokens, the target {target.max_model_len}: "
        "longer sequences go on without drafts"
    ]


def _shown(token: str | list[str] | None) -> str:
    return "nothing" if token is None else repr(token)
