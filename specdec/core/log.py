"""Points in a sequence's log, and the log itself."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from specdec.core.tokens import (
    PrefixDigests,
    SharedTokens,
    TokenArray,
    TokenBuffer,
    TokenSequence,
)
from specdec.core.types import Tokens

_PREFIX_HASHES_KEPT = 16
"""Of a log: a step and the offers that wait for it ask for the same few again and again."""


class PrefixHash(NamedTuple):
    """The first ``length`` tokens of a log, prompt included, and a 64-bit hash of them."""

    length: int
    digest: int


class Extension(Enum):
    """What a message did to a log it was laid over."""

    EXTENDED = "extended"
    NOTHING_NEW = "nothing new"
    GAP = "gap"
    MISMATCH = "mismatch"


class TokenLog:
    """A log of tokens that only grows, with a digest of each of its prefixes, worked out when it is asked for.

    A prompt that is given as :class:`SharedTokens` is not copied until somebody asks for all tokens in one piece.

    Args:
        prompt: Its first tokens.
        output: What follows them.
    """

    __slots__ = ("_digests", "_part", "_prefix_hashes", "prompt")

    def __init__(self, prompt: SharedTokens | Iterable[int] | TokenArray = (), output: TokenSequence = ()) -> None:
        self.prompt = prompt if isinstance(prompt, SharedTokens) else SharedTokens(prompt)
        # What grows, and how many tokens are before it: all of the prompt, or none once the two are in one piece.
        self._part = TokenBuffer(output), len(self.prompt)
        self._digests: PrefixDigests | None = None  # of what follows the prompt, which is hashed when it has to be
        self._prefix_hashes: dict[int, PrefixHash] = {}

    def __len__(self) -> int:
        own, num_before = self._part
        return num_before + len(own.array)

    @property
    def tokens(self) -> TokenArray:
        """int32 [length], read-only: all tokens in one piece. It stays as it is when the log grows."""
        own, num_before = self._part
        if num_before:
            if not len(own):
                return self.prompt.tokens
            joined = TokenBuffer(self.prompt.tokens)
            joined.extend(own.array)
            self._part = joined, 0
            return joined.array
        return own.array

    def array(self, start: int, stop: int | None = None) -> TokenArray:
        """Tokens [start, stop), read-only."""
        own, num_before = self._part
        stop = num_before + len(own) if stop is None else stop
        if start >= num_before:
            return own.array[start - num_before : stop - num_before]
        return self.prompt.tokens[start:stop] if stop <= num_before else self.tokens[start:stop]

    def tail(self, start: int, stop: int | None = None) -> Tokens:
        """Tokens [start, stop) as a tuple; for short pieces."""
        own, num_before = self._part
        if stop is None and start >= num_before:
            return tuple(own.array[start - num_before :].tolist())
        return tuple(self.array(start, stop).tolist())

    def prefix_hash(self, length: int | None = None) -> PrefixHash:
        """The prefix hash of the first ``length`` tokens; of all of them by default."""
        length = len(self) if length is None else length
        prefix_hash = self._prefix_hashes.get(length)
        if prefix_hash is None:
            prefix_hash = PrefixHash(length, self._digest(length))
            if len(self._prefix_hashes) >= _PREFIX_HASHES_KEPT:
                self._prefix_hashes = {}
            self._prefix_hashes[length] = prefix_hash
        return prefix_hash

    def has(self, prefix_hash: PrefixHash) -> bool:
        """Whether the first tokens of this log are those of ``prefix_hash``."""
        return prefix_hash.length <= len(self) and self.prefix_hash(prefix_hash.length) == prefix_hash

    def since(self, prefix_hash: PrefixHash) -> Tokens | None:
        """The tokens after a prefix; None where this log does not have it."""
        return self.tail(prefix_hash.length) if self.has(prefix_hash) else None

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        self._part[0].extend(tokens)

    def extend_to(self, base: int, tokens: Tokens, prefix_hash: PrefixHash) -> Extension:
        """Take what a message has beyond this log, if and only if the result has the message's prefix hash.

        Rule 2 of the protocol: tokens are taken by position, once, and checked. Nothing changes unless the answer is
        ``EXTENDED``.

        Args:
            base: Length of the sender's log before ``tokens``.
            tokens: The sender's tokens from ``base`` on.
            prefix_hash: The sender's prefix hash after ``tokens``.
        """
        if base > len(self):
            return Extension.GAP
        new = tokens[len(self) - base :]
        if not new:
            return Extension.NOTHING_NEW if self.has(prefix_hash) else Extension.MISMATCH
        old = len(self)
        self.extend(new)
        if self.prefix_hash() == prefix_hash:
            return Extension.EXTENDED
        own, num_before = self._part
        own.truncate(old - num_before)
        if self._digests is not None:
            self._digests.forget(old - len(self.prompt))
        self._prefix_hashes = {}
        return Extension.MISMATCH

    def _digest(self, length: int) -> int:
        num_prompt = len(self.prompt)
        if length <= num_prompt:
            state = self.prompt.hash_state(length)
        else:
            own, num_before = self._part
            if self._digests is None:
                self._digests = PrefixDigests(self.prompt.hash_state(num_prompt))
            state = self._digests.state(own.array[num_prompt - num_before :], length - num_prompt)
        return int.from_bytes(state.digest(), "little")
