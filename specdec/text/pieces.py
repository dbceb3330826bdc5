"""The text and the bytes of single tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
