"""Points in a sequence's log, and the log itself."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from specdec.types import Tokens

_MODULUS = (1 << 61) - 1
_BASE = 0x1D3F84A56B2C97E1 % _MODULUS


class Mark(NamedTuple):
    """The first ``length`` tokens of a log, prompt included, and a 61-bit rolling hash of them."""

    length: int
    digest: int


class Extension(Enum):
    """What a message did to a log it was laid over."""

    EXTENDED = "extended"
    NOTHING_NEW = "nothing new"
    GAP = "gap"
    MISMATCH = "mismatch"


class TokenLog:
    """A log of tokens that only grows, with the digest of each of its prefixes, worked out when it is asked for.

    Polynomial rolling hash modulo the Mersenne prime 2**61 - 1 (Karp and Rabin 1987).
    """

    __slots__ = ("_digests", "_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._digests: list[int] = [0]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The tokens themselves; callers must not change the list."""
        return self._tokens

    def tail(self, start: int, stop: int | None = None) -> Tokens:
        """Tokens [start, stop) as a tuple."""
        return tuple(self._tokens[start:stop])

    def mark(self, length: int | None = None) -> Mark:
        """The mark of the first ``length`` tokens; of all of them by default."""
        length = len(self._tokens) if length is None else length
        return Mark(length, self._digest(length))

    def has(self, mark: Mark) -> bool:
        """Whether the first tokens of this log are those of ``mark``."""
        length, digest = mark
        return length <= len(self._tokens) and self._digest(length) == digest

    def since(self, mark: Mark) -> Tokens | None:
        """The tokens after a mark; None where this log does not have it."""
        length, digest = mark
        tokens, digests = self._tokens, self._digests
        if length > len(tokens):
            return None
        own = digests[length] if length < len(digests) else self._digest(length)
        return tuple(tokens[length:]) if own == digest else None

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        self._tokens.extend(tokens)

    def extend_to(self, base: int, tokens: Tokens, mark: Mark) -> Extension:
        """Take what a message has beyond this log, if and only if the result has the message's mark.

        Rule 2 of the protocol: tokens are taken by position, once, and checked. Nothing changes unless the answer is
        ``EXTENDED``.

        Args:
            base: Length of the sender's log before ``tokens``.
            tokens: The sender's tokens from ``base`` on.
            mark: The sender's mark after ``tokens``.
        """
        if base > len(self):
            return Extension.GAP
        new = tokens[len(self) - base :]
        if not new:
            return Extension.NOTHING_NEW if self.has(mark) else Extension.MISMATCH
        old = len(self)
        self.extend(new)
        if self.mark() == mark:
            return Extension.EXTENDED
        del self._tokens[old:], self._digests[old + 1 :]
        return Extension.MISMATCH

    def _digest(self, length: int) -> int:
        digests = self._digests
        known = len(digests)
        if length >= known:
            digest, new = digests[known - 1], []
            for token in self._tokens[known - 1 :]:
                digest = (digest * _BASE + token + 1) % _MODULUS
                new.append(digest)
            digests[known:] = new  # the same, and at once, where two threads are asked at a time
        return digests[length]


def common_prefix_length(a: list[int], b: list[int], start: int = 0) -> int:
    """Length of the longest common prefix of two token lists, known to agree on the first ``start`` tokens."""
    end = min(len(a), len(b))
    if a[start:end] == b[start:end]:
        return end
    for i in range(start, end):
        if a[i] != b[i]:
            return i
    return end
