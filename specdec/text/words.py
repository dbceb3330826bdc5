"""Words that an output must not hold, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.core.errors import InvalidParameterError
from specdec.core.types import Tokens
from specdec.text.prompts import check_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_bad_words(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[Tokens, ...]:
    """The tokens of words, each as it stands at the beginning of a text and after a space.

    As in vLLM the form after a space counts only where it has as many tokens, and another first one: else it would
    forbid the space. A word that the model spells with other tokens is not found.

    Raises:
        InvalidParameterError: A word is empty, has no tokens, or holds half a surrogate pair.
    """
    forms: dict[Tokens, None] = {}
    for word in words:
        check_text(word, "bad_words")
        alone, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word.lstrip())
        )
        if not alone:
            raise InvalidParameterError("bad_words", f"bad_words holds {word!r}, which has no tokens")
        forms[alone] = None
        if spaced and len(spaced) == len(alone) and spaced[0] != alone[0]:
            forms[spaced] = None
    return tuple(forms)


def separates_special_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer writes something of its own between two special tokens."""
    special = [token for token in tokenizer.all_special_ids if token is not None][:1]
    if not special:
        return False
    one, two = (str(tokenizer.decode(special * n, clean_up_tokenization_spaces=False)) for n in (1, 2))
    return two != one * 2
