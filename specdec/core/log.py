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

_MARKS_KEPT = 16
"""Of a log: a step and the offers that wait for it ask for the same few again and again."""


class Mark(NamedTuple):
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

    __slots__ = ("_digests", "_marks", "_part", "prompt")

    def __init__(self, prompt: SharedTokens | Iterable[int] | TokenArray = (), output: TokenSequence = ()) -> None:
        self.prompt = prompt if isinstance(prompt, SharedTokens) else SharedTokens(prompt)
        # What grows, and how many tokens are before it: all of the prompt, or none once the two are in one piece.
        self._part = TokenBuffer(output), len(self.prompt)
        self._digests: PrefixDigests | None = None  # of what follows the prompt, which is hashed when it has to be
        self._marks: dict[int, Mark] = {}

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
        return tuple(self.array(start, stop).tolist())

    def mark(self, length: int | None = None) -> Mark:
        """The mark of the first ``length`` tokens; of all of them by default."""
        length = len(self) if length is None else length
        mark = self._marks.get(length)
        if mark is None:
            mark = Mark(length, self._digest(length))
            if len(self._marks) >= _MARKS_KEPT:
                self._marks = {}
            self._marks[length] = mark
        return mark

    def has(self, mark: Mark) -> bool:
        """Whether the first tokens of this log are those of ``mark``."""
        return mark.length <= len(self) and self.mark(mark.length) == mark

    def since(self, mark: Mark) -> Tokens | None:
        """The tokens after a mark; None where this log does not have it."""
        return self.tail(mark.length) if self.has(mark) else None

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        self._part[0].extend(tokens)

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
        own, num_before = self._part
        own.truncate(old - num_before)
        if self._digests is not None:
            self._digests.forget(old - len(self.prompt))
        self._marks = {}
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
