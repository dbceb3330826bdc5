"""Tokens as int32 arrays: buffers that grow, immutable tokens that many share, digests of prefixes.

A long prompt takes 4 bytes a token, is compared and copied at the speed of memory, and is not copied to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import overload

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.int32]
"""int32 [n], little-endian; read-only wherever it is handed out."""
TokenSequence = Sequence[int] | TokenArray
"""Token ids in whatever holds them. Slices of an array are arrays, and its items are numpy's integers: use ``tolist``
or ``int`` before they go into a message."""

DTYPE = np.dtype("<i4")
MAX_ID = 2**31 - 1
"""The largest token id that can be kept."""
_STRIDE = 1024
"""The state of the hash is kept every so many tokens: some 0.4 bytes a token, and at most this many to hash for a
digest of any prefix."""


def as_array(tokens: Iterable[int] | TokenArray) -> TokenArray:
    """Tokens as an int32 array, without a copy where they are one.

    Raises:
        OverflowError: A token does not fit into 32 bits.
    """
    if isinstance(tokens, np.ndarray):
        return tokens if tokens.dtype == DTYPE else np.asarray(tokens).astype(DTYPE, casting="safe")
    return np.array(tokens if isinstance(tokens, list | tuple) else list(tokens), dtype=DTYPE)


def are_ids(tokens: Sequence[int]) -> bool:
    """Whether all of them can be token ids: none is negative, and each fits into 32 bits."""
    return not tokens or (min(tokens) >= 0 and max(tokens) <= MAX_ID)


def as_list(tokens: TokenSequence) -> list[int]:
    """Tokens as plain integers; for short pieces."""
    return tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)


def followed(tokens: TokenSequence, by: Sequence[int]) -> TokenArray:
    """Tokens with some others after them, in a new array."""
    return np.concatenate((as_array(tokens), as_array(by)))


def common_prefix_length(a: TokenSequence, b: TokenSequence, start: int = 0) -> int:
    """Length of the longest common prefix of two runs of tokens, known to agree on the first ``start`` tokens."""
    end = min(len(a), len(b))
    if start >= end:
        return end
    differs = np.asarray(a[start:end]) != np.asarray(b[start:end])
    first = int(differs.argmax())
    return start + first if differs[first] else end


class PrefixDigests:
    """64-bit digests of the prefixes of tokens that only grow: BLAKE2b over their bytes, on every machine the same.

    Microseconds per thousand tokens, and never more than a stride of tokens for a prefix of what was hashed before.

    Args:
        state: The hash after what goes before all tokens; by default there is nothing.
    """

    __slots__ = ("_states",)

    def __init__(self, state: blake2b | None = None) -> None:
        self._states = [blake2b(digest_size=8) if state is None else state]

    def state(self, tokens: TokenArray, length: int) -> blake2b:
        """The hash after ``tokens[:length]``; the caller's own."""
        states, whole = self._states, length // _STRIDE
        known = len(states)
        if whole >= known:
            state, new = states[-1], []
            for index in range(known - 1, whole):
                state = state.copy()
                state.update(tokens[index * _STRIDE : (index + 1) * _STRIDE].data)
                new.append(state)
            states[known:] = new  # the same, and at once, where two threads ask at a time
        state = states[whole].copy()
        state.update(tokens[whole * _STRIDE : length].data)
        return state

    def forget(self, length: int) -> None:
        """Only the first ``length`` tokens will be the same from now on."""
        del self._states[length // _STRIDE + 1 :]


class TokenBuffer:
    """Tokens that grow at the end, and can be cut there: a list of integers that holds 4 bytes a token.

    It equals any sequence of the same tokens.

    Attributes:
        array: int32 [n], all of them, read-only. It is good until the buffer is cut back below its end.
    """

    __slots__ = ("_items", "_readable", "array")

    def __init__(self, tokens: Iterable[int] | TokenArray = ()) -> None:
        self._room(0)
        self.array: TokenArray = self._readable
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> TokenArray: ...

    def __getitem__(self, place: int | slice) -> int | TokenArray:
        return self.array[place] if isinstance(place, slice) else int(self.array[place])

    def __eq__(self, other: object) -> bool:
        return np.array_equal(self.array, other.array if isinstance(other, TokenBuffer) else other)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenBuffer({self.array.tolist()})"

    def append(self, token: int) -> None:
        """Append a token."""
        self.extend((token,))

    def extend(self, tokens: Iterable[int] | TokenArray) -> None:
        """Append tokens.

        Raises:
            OverflowError: One of them does not fit into 32 bits; nothing is appended.
        """
        new = tokens if isinstance(tokens, (list, tuple)) else as_array(tokens)
        start = len(self.array)
        end = start + len(new)
        if end > len(self._items):
            self._room(end + end // 8 + 16)
            self._items[:start] = self.array
        if end == start + 1:  # as in every step; numpy is ten times as fast by number
            self._items[start] = new[0]
        else:
            self._items[start:end] = new
        self.array = self._readable[:end]

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens, at most as many as there are."""
        self.array = self.array[:length]

    def copy(self) -> TokenBuffer:
        """Another with the same tokens."""
        return TokenBuffer(self.array)

    def _room(self, size: int) -> None:
        self._items = np.empty(size, dtype=DTYPE)
        self._readable = self._items[:]
        self._readable.flags.writeable = False


class SharedTokens:
    """Tokens that never change, and that many sequences share: a prompt, of which each digest is worked out once.

    Two are equal if their tokens are.

    Attributes:
        tokens: int32 [n], read-only.
    """

    __slots__ = ("_block_digests", "_digests", "tokens")

    def __init__(self, tokens: Iterable[int] | TokenArray = ()) -> None:
        array = as_array(tokens)
        if array.flags.writeable:
            array = array.copy() if isinstance(tokens, np.ndarray) else array
            array.flags.writeable = False
        self.tokens: TokenArray = array
        self._digests = PrefixDigests()
        self._block_digests: dict[tuple[int, int], list[int]] = {}

    @classmethod
    def from_bytes(cls, data: bytes) -> SharedTokens:
        """Of little-endian int32, which are not copied.

        Raises:
            ValueError: It is not a whole number of tokens.
        """
        return cls(np.frombuffer(data, dtype=DTYPE))

    def to_bytes(self) -> bytes:
        """As little-endian int32."""
        return self.tokens.tobytes()

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens.tolist())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SharedTokens) and np.array_equal(self.tokens, other.tokens))

    def __hash__(self) -> int:
        return hash(self.tokens.tobytes())

    def __reduce__(self) -> tuple[type[SharedTokens], tuple[TokenArray]]:
        return SharedTokens, (self.tokens,)  # what is hashed so far stays here: vLLM sends specs to its workers

    def __repr__(self) -> str:
        return f"SharedTokens({self.tokens.tolist()})"

    def hash_state(self, length: int) -> blake2b:
        """See :meth:`PrefixDigests.state`."""
        return self._digests.state(self.tokens, length)

    def block_digests(self, size: int, most: int) -> list[int]:
        """The digests of the first ``most`` prefixes of whole blocks of ``size`` tokens; worked out once."""
        known = self._block_digests.get((size, most))
        if known is None:
            known, state = [], blake2b(digest_size=8)
            for start in range(0, min(most, len(self.tokens) // size) * size, size):
                state.update(self.tokens[start : start + size].data)
                known.append(int.from_bytes(state.digest(), "little"))
            self._block_digests[size, most] = known
        return known


NO_TOKENS = SharedTokens()
"""None at all."""
