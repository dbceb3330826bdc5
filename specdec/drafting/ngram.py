"""Prompt lookup (n-grams): drafts from where a text's end has occurred before, in itself or in its prediction.

A sequence's log on a target only grows, so its index does as well, and dies with the row: it is made again from the log
wherever the sequence is opened next. It is asked once an outcome is known, and so has no branches for others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from specdec.core.drafts import NO_DRAFT, Draft
from specdec.core.log import TokenLog
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenArray, TokenSequence, as_array, followed
from specdec.core.types import Tokens

LEAST_MATCH = 3
"""Tokens that must have occurred before, at the least; vLLM and llama.cpp begin there or near it."""
LONG_MATCH = 8
"""From here on a match goes before what a draft model offers. A choice: a draft is as long as its match, so this one
says more than draft models usually do in a round, and in a text that repeats nothing so long a match hardly occurs."""
_MOST_NEEDED = 64
"""Where matches were wrong again and again, one that is as long as this is still believed."""
_MOST_PLACES = 32
"""Earlier places of the same tokens that are compared, the newest first."""
_MOST_READ = 8192
"""Tokens that a step indexes, of all rows together: a millisecond. A long prompt's own reading takes steps, too."""
_FEW = 64
"""So many tokens are indexed one by one."""
_GAP = -1
"""Between two texts: no token, so that no match reaches across."""
_LEAST_HASH_BITS, _MOST_HASH_BITS = 10, 17
_FACTORS = 0x9E3779B1, 0x5EBCA77B, 0x42B2AE3D
"""Odd, and so large that the upper bits of the sum depend on all three tokens."""


class TokenDrafter(Protocol):
    """Drafts for one sequence from its tokens alone: prompt lookup here, or one from outside the tree.

    It may propose anything, as no token depends on it. But what it proposes must depend on committed tokens only.
    """

    @property
    def is_long(self) -> bool:
        """Whether the newest draft is so sure that it goes before a draft model's offer."""
        ...

    def draft(self, log: TokenLog, room: int, reading: Reading) -> Draft:
        """What may follow a log, which only grows from call to call; called before each round.

        Args:
            log: All of the sequence's tokens.
            room: Most tokens of the draft.
            reading: What may be indexed in this step.
        """
        ...

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a round that verified its draft."""
        ...


NewTokenDrafter = Callable[[SequenceSpec, int], TokenDrafter | None]
"""Makes the drafter of a sequence, which drafts so many tokens in a round at most; None where it has none for it."""


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Which sequences are drafted for from their tokens, by what, and how far.

    Attributes:
        most: Draft tokens of a round, at most, where the request names no bound of its own.
        for_all: For all sequences; else for those that bring a prediction.
        new: Makes the drafter of a sequence without a prediction; None: prompt lookup.
    """

    most: int
    for_all: bool = True
    new: NewTokenDrafter | None = None


class TextIndex:
    """A growing text, and where each run of ``LEAST_MATCH`` tokens stands in it; some 12 bytes a token.

    A hash of a run finds its newest place, and each place leads to the one before with the same hash. What is found is
    compared with the text.

    Args:
        most_tokens: Tokens that it is likely to have in the end; with more it is slower.
        num_apart: Of the first tokens, which are a text of their own. A ``_GAP`` follows them.

    Attributes:
        tokens: The text, as int32; callers must not change it.
        num_apart: As given.
    """

    def __init__(self, most_tokens: int = 0, num_apart: int = 0) -> None:
        bits = min(max(most_tokens.bit_length(), _LEAST_HASH_BITS), _MOST_HASH_BITS)
        self.tokens = array("i")
        self._shift = 32 - bits
        # The newest place of each hash, and of each place the one before; a place is the number of tokens up to there.
        self._newest = np.zeros(1 << bits, dtype=np.int32)
        self._before = array("i", (0,))
        self.num_apart = num_apart

    def extend(self, tokens: TokenSequence) -> None:
        """Add tokens at the end."""
        first = len(self.tokens) + 1
        self.tokens.frombytes(as_array(tokens).tobytes())
        if len(tokens) > _FEW:
            return self._extend_by_many(first)
        text, newest, before = self.tokens, self._newest, self._before
        for place in range(first, len(text) + 1):
            if place < LEAST_MATCH:
                before.append(0)
                continue
            key = self._hash(*text[place - LEAST_MATCH : place])
            before.append(int(newest[key]))
            newest[key] = place
        return None

    def _extend_by_many(self, first: int) -> None:
        """Place all tokens from the ``first`` on; the same as one by one."""
        self._before.extend([0] * (min(LEAST_MATCH - 1, len(self.tokens)) + 1 - len(self._before)))
        first = max(first, LEAST_MATCH)
        if first > len(self.tokens):
            return
        text = np.frombuffer(self.tokens, dtype=np.int32)[first - LEAST_MATCH :].astype(np.int64)
        keys = self._hash(text[:-2], text[1:-1], text[2:])
        order = keys.argsort(kind="stable")
        keys, places = keys[order], (order + first).astype(np.int32)
        before = self._newest[keys]
        is_again = keys[1:] == keys[:-1]
        before[1:][is_again] = places[:-1][is_again]
        is_last = np.append(~is_again, True)
        self._newest[keys[is_last]] = places[is_last]
        in_order = np.empty_like(before)
        in_order[order] = before
        self._before.frombytes(in_order.tobytes())

    def _hash(self, a: Any, b: Any, c: Any) -> Any:
        """Of a run of three tokens, or of the runs in three int64 arrays."""
        return ((a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2]) & 0xFFFFFFFF) >> self._shift

    def search(self, text: array[int]) -> tuple[int, int]:
        """The longest match of a text's end, this one's or another's: the place after it, and its length or 0.

        What stands apart goes first. The end itself is no match.
        """
        if text is self.tokens:
            place = self._before[-1]
        else:
            place = int(self._newest[self._hash(*text[-LEAST_MATCH:])]) if len(text) >= LEAST_MATCH else 0
        tokens, end, best, found = self.tokens, len(text), LEAST_MATCH - 1, 0
        for _ in range(_MOST_PLACES):
            if not place:
                break
            needed = best if place < self.num_apart and found else best + 1
            is_followed = place < len(tokens) and tokens[place] != _GAP
            if is_followed and needed <= place and tokens[place - needed : place] == text[end - needed : end]:
                while needed < min(place, end, _MOST_NEEDED) and tokens[place - needed - 1] == text[end - needed - 1]:
                    needed += 1
                best, found = needed, place
            place = self._before[place]
        return (found, best) if found else (0, 0)


class Reading:
    """Bounds what a step indexes for all of its rows together: many long prompts must not hold it up.

    What a row has decoded since its step before is always read.
    """

    def __init__(self) -> None:
        self._left = _MOST_READ

    def take(self, num_unread: int) -> int:
        """How many of a row's unread tokens it may index now."""
        if num_unread <= _FEW:
            return num_unread
        count = min(num_unread, self._left)
        self._left -= count
        return count


class Match:
    """Where a text's end stands in an index. A match that the text goes on to follow is kept: it stays the longest.

    Attributes:
        index: Where it was looked for.
        place: Where what followed begins.
        length: Tokens that match; 0 where there is none.
    """

    __slots__ = ("index", "length", "place")

    def __init__(self, index: TextIndex) -> None:
        self.index = index
        self.place = self.length = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """The text has gone on with these."""
        known = self.index.tokens
        for token in tokens:
            if not self.length:
                return
            if self.place < len(known) and known[self.place] == token:
                self.place, self.length = self.place + 1, self.length + 1
            else:
                self.length = 0

    def find(self, text: array[int]) -> None:
        """Look for the text's end, where none is followed."""
        if not self.length:
            self.place, self.length = self.index.search(text)

    def following(self, count: int) -> Tokens:
        """What followed there, ``count`` tokens at most; what reaches the index's end is taken to repeat itself."""
        tokens, place = self.index.tokens, self.place
        period = len(tokens) - place
        return tuple(takewhile(lambda token: token != _GAP, (tokens[place + i % period] for i in range(count))))


def token_drafter(spec: SequenceSpec, options: NgramOptions | None) -> TokenDrafter | None:
    """What drafts for a new sequence from its tokens, or None. A prediction is looked up whatever else drafts."""
    if options is None or not (options.for_all or spec.prediction):
        return None
    most = options.most if spec.num_speculative_tokens is None else spec.num_speculative_tokens
    new = NgramDrafter if options.new is None or spec.prediction else options.new
    return new(spec, most) if most else None


class NgramDrafter:
    """Prompt lookup of one sequence. A draft is as long as its match; wrong drafts raise the length that is asked for.

    Args:
        spec: Of the sequence.
        most: Draft tokens of a round, at most.

    Attributes:
        is_long: Whether the newest match is so long that it goes before a draft model's offer.
    """

    __slots__ = ("_ending", "_most", "_needed", "_num_predicted", "_num_read", "_own", "_spec", "is_long")

    def __init__(self, spec: SequenceSpec, most: int) -> None:
        self._spec = spec
        self._most = most
        self._ending = spec.ending_token_ids
        most_tokens = len(spec.prediction) + spec.output_start + spec.max_tokens
        self._own = Match(TextIndex(most_tokens, len(spec.prediction)))
        self._needed = LEAST_MATCH
        self._num_predicted = 0
        self._num_read = 0
        self.is_long = False

    def draft(self, log: TokenLog, room: int, reading: Reading) -> Draft:
        """What may follow a log, which only grows from call to call.

        Args:
            log: All of the sequence's tokens.
            room: Most tokens of the draft.
            reading: What may be indexed in this step.
        """
        if not self._has_prediction(reading):
            return NO_DRAFT
        start = self._num_read
        new = log.array(start, start + reading.take(len(log) - start))
        self._num_read += len(new)
        match = self._longest_match(log, new)
        self.is_long = match is not None and match.length >= LONG_MATCH
        if match is None:
            return NO_DRAFT
        count = min(self._most, room, match.length)
        if match.length < self._needed or count <= 0:
            return NO_DRAFT
        tokens = self._cut(match.following(count))
        return Draft(tokens, source="prediction" if match.place < match.index.num_apart else "ngram")

    def _has_prediction(self, reading: Reading) -> bool:
        """Index the next part of the prediction; False until all of it is there. The log comes after it."""
        tokens, start = self._spec.prediction.tokens, self._num_predicted
        if start < len(tokens):
            part = tokens[start : start + reading.take(len(tokens) - start)]
            self._num_predicted += len(part)
            is_whole = self._num_predicted == len(tokens)
            self._own.index.extend(followed(part, (_GAP,)) if is_whole else part)
        return self._num_predicted == len(tokens)

    def _longest_match(self, log: TokenLog, new: TokenArray) -> Match | None:
        """Of the log's end, after ``new``; None while the log is not read."""
        own = self._own
        own.index.extend(new)
        if own.length:
            own.follow(new.tolist())
        if self._num_read < len(log):
            return None
        if self._spec.prediction and len(log) == self._spec.output_start:
            own.place, own.length = 0, LONG_MATCH  # as if so much had matched before its beginning
        own.find(own.index.tokens)
        return own

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a round: a draft of which little was right doubles what a match must have.

        Little is less than half of it, and less than so many tokens as a match must have at the least.
        """
        is_right = num_accepted >= min(LEAST_MATCH, num_drafted / 2)
        self._needed = LEAST_MATCH if is_right else min(2 * self._needed, _MOST_NEEDED)

    def _cut(self, tokens: Tokens) -> Tokens:
        """Up to the first token that would end the sequence, that included."""
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in self._ending), tokens)


def drafter(args: object) -> NewTokenDrafter:
    """Make prompt lookup for any configuration ``args``; ``draft.method: ngram`` names this function."""
    return NgramDrafter
