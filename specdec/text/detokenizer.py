"""Text from tokens as they come, never half a character.

The text and the bytes of single tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_REPLACEMENT = "\ufffd"
_MOST_HELD = 3
"""A UTF-8 character has four bytes at most, so no more than three can wait for the rest."""
_CONTEXT = 8
"""Tokens kept before the new ones: more than the bytes of a character, and enough for a decoder to see no start."""
_MOST_TOKENS = 24


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that ``tokenizer.decode(..., skip_special_tokens=True)`` leaves out."""
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


class Detokenizer:
    """Turns a growing list of tokens into a growing text, at a constant cost per token.

    The pieces ``push`` returns, with what ``finish`` returns, are together ``tokenizer.decode`` of all tokens
    (without clean-up of spaces). One case is left out on purpose: where a byte-fallback decoder replaces a whole run
    of bytes because its end is not valid UTF-8, the valid characters that were delivered stand.

    Each token is decoded within a window of the last few tokens, so that decoders which treat the first token
    differently (a leading space is dropped) see no first token. What may still become a character is held back.

    Args:
        tokenizer: Any fast tokenizer of transformers.
        prompt: Tokens that come before; their end gives the context, and is not part of the text.
        skip_special_tokens: Leave special tokens out of the text.
        kept: But not these.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = special_token_ids(tokenizer) - kept if skip_special_tokens else frozenset()
        self._window = [token for token in prompt[-_CONTEXT:] if token not in self._skipped]
        self._before = self._decode(self._window)
        self._shown = self._before[: len(self._before) - _num_held(self._before)]
        self._num_clean = len(self._window) if self._shown == self._before else 0

    def push(self, token: int) -> str:
        """Take one token and return the text that is now certain; often a word, sometimes nothing."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if self._num_clean and not text.startswith(self._shown):
            # A byte-fallback decoder went back on text that has been delivered: start at what has not.
            del self._window[: self._num_clean]
            self._num_clean, self._shown = 0, ""
            text = self._decode(self._window)
        end = max(len(self._shown), len(text) - _num_held(text))
        if end > len(self._before):
            self._leave_to_prompt(text)
        piece = text[len(self._shown) : end]
        self._shown = text[:end]
        if end == len(text):
            self._num_clean = len(self._window)
        if len(self._window) > _MOST_TOKENS:
            self._shrink(text)
        return piece

    def push_all(self, tokens: Sequence[int]) -> str:
        """Take several tokens and return what ``push`` would of each of them, joined; mostly at the cost of one."""
        kept = [token for token in tokens if token not in self._skipped]
        if len(kept) > 1 and not self._before and self._num_clean == len(self._window):
            text = self._decode(self._window + kept)
            piece = text[len(self._shown) :]
            # Where all that is new is whole characters, none of the steps to it went back on another.
            if text.startswith(self._shown) and _REPLACEMENT not in piece:
                self._window += kept
                self._shown, self._num_clean = text, len(self._window)
                if len(self._window) > _MOST_TOKENS:
                    self._shrink(text)
                return piece
        return "".join(map(self.push, kept))

    def finish(self) -> str:
        """Return what was held back: the sequence has ended, and the rest of the character will not come."""
        text = self._decode(self._window)
        self._leave_to_prompt(text)
        held = text[len(self._shown) :]
        self._shown = text
        return held

    def _leave_to_prompt(self, text: str) -> None:
        """A prompt that ended within a character keeps the replacement for it, if the output did not complete it."""
        if text.startswith(self._before) and len(self._shown) < len(self._before):
            self._shown = self._before
        self._before = ""

    def _shrink(self, text: str) -> None:
        """Forget the oldest tokens, where the rest decodes to the same end."""
        held = text[len(self._shown) :]
        rest = self._decode(self._window[-_CONTEXT:])
        if not rest.endswith(held) or len(rest) == len(held):
            return
        self._shown = rest[: len(rest) - len(held)]
        self._num_clean = max(0, self._num_clean - (len(self._window) - _CONTEXT))
        del self._window[:-_CONTEXT]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text


def _num_held(text: str) -> int:
    """Characters at the end of a text that later bytes may still change."""
    end = text[-_MOST_HELD:]
    return len(end) - len(end.rstrip(_REPLACEMENT))


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    r"""What each token contributes to a text, as far as one can say that of a token alone.

    A token that is not valid UTF-8 by itself is written as OpenAI does: ``bytes:\xe2\x82``.

    Args:
        tokenizer: Any fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._known: dict[int, tuple[str, bytes]] = {}
        # Decoders treat the first token differently (a leading space is dropped), so each token is decoded second.
        self._anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._decode(self._anchor)

    def text(self, token: int) -> str:
        """The token's text, special tokens as they are written."""
        return self._both(token)[0]

    def utf8(self, token: int) -> bytes:
        """The token's bytes; those of several tokens, one after the other, are those of the text."""
        return self._both(token)[1]

    def _both(self, token: int) -> tuple[str, bytes]:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> tuple[str, bytes]:
        text = self._decode([*self._anchor, token])[len(self._anchor_text) :]
        if "\ufffd" not in text:
            return text, text.encode()
        raw = self._raw_bytes(self._tokenizer.convert_ids_to_tokens(token))
        if raw is None:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _raw_bytes(self, written: str) -> bytes | None:
        """The bytes of a byte-fallback or byte-level token, by the way the vocabulary writes it."""
        match = _BYTE_TOKEN.fullmatch(written)
        if match:
            return bytes([int(match[1], 16)])
        if all(character in self._byte_of for character in written):
            return bytes(self._byte_of[character] for character in written)
        return None

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text
