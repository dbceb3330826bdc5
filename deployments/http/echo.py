"""Prompts as the beginning of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.core.types import Tokens
from specdec.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt to be echoed.

    Attributes:
        text: As it was sent, or that of its tokens.
        offsets: For each of its tokens, the number of characters of the text before it; empty where not asked for.
    """

    text: str
    offsets: Tokens = ()


def make_echo(
    tokenizer: PreTrainedTokenizerBase, sent: str | list[int], tokens: Sequence[int], with_offsets: bool
) -> Echo:
    """The echo of a prompt.

    Tokens that the tokenizer put before a text (a beginning-of-sequence token) lie at its beginning.

    Args:
        tokenizer: Any fast tokenizer of transformers.
        sent: The prompt as the request has it.
        tokens: The prompt's tokens.
        with_offsets: Whether the tokens' places are needed.
    """
    text = sent if isinstance(sent, str) else str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    return Echo(text, _offsets(tokenizer, text, tokens) if with_offsets else ())


def _offsets(tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[int]) -> Tokens:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(detokenizer.push(token)))
    num_added = max(0, ends[-1] + len(detokenizer.finish()) - len(text))
    return tuple(max(0, end - num_added) for end in ends[:-1])
