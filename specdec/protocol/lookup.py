"""Look-up: drafts without a model, from the text itself where its end has occurred before.

A sequence's log on a target only grows, so its index does as well, and dies with the row: it is made again from the log
wherever the sequence is opened next.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from specdec.protocol.marks import TokenLog
from specdec.protocol.messages import Candidates
from specdec.protocol.offers import NO_DRAFT, Draft
from specdec.sampling.params import SequenceSpec
from specdec.types import Tokens

LEAST_MATCH = 3
"""Tokens that must have occurred before, at the least; vLLM's and llama.cpp's look-ups begin there or near it."""
LONG_MATCH = 8
"""From here on a match goes before what a draft model offers."""
_MOST_NEEDED = 64
"""Where matches were wrong again and again, one that is as long as this is still believed."""
_MOST_PLACES = 32
"""Earlier places of the same tokens that are compared, the newest first."""
_MOST_READ = 4096
"""Tokens that are indexed at once: a long prompt must not hold up a step, and its own reading takes several."""
_GAP = -1
"""Between two texts: no token, so that no match reaches across."""
_KEY_BITS = 32
_KEY_MASK = (1 << _KEY_BITS * LEAST_MATCH) - 1


@dataclass(frozen=True, slots=True)
class LookUpOptions:
    """Which sequences are drafted for by look-up, and how far.

    Attributes:
        most: Draft tokens of a round, at most, where the request names no bound of its own.
        for_all: For all sequences; else for those that bring a prediction.
    """

    most: int
    for_all: bool = True


class TextIndex:
    """A growing text, and where its end occurred in it before; constant time and some 150 bytes a token.

    Each run of ``LEAST_MATCH`` tokens is found by its newest place, and each place leads to the one before. A match
    that the text goes on to follow is kept: it stays the longest.

    Args:
        text: What goes before all that is added, apart from it.

    Attributes:
        length: Tokens of the newest match; 0 where there is none.
        place: Where what followed the match begins.
    """

    def __init__(self, text: Sequence[int] = ()) -> None:
        self.place = self.length = 0
        self._text: list[int] = []
        self._key = 0
        self._newest: dict[int, int] = {}
        self._before = array("q", (0,))
        self.num_apart = len(text)
        if text:
            self.extend([*text, _GAP])

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        text, newest, before, key = self._text, self._newest, self._before, self._key
        for token in tokens:
            if self.length and text[self.place] == token:
                self.place, self.length = self.place + 1, self.length + 1
            else:
                self.length = 0
            text.append(token)
            key = (key << _KEY_BITS | token + 1) & _KEY_MASK
            before.append(newest.get(key, 0))
            newest[key] = len(text)
        self._key = key

    def expect(self, length: int) -> None:
        """Take the beginning of the text apart for what comes next, as if so many tokens had matched."""
        self.place, self.length = 0, length

    def find(self) -> None:
        """Look for the longest match of the text's end, where none is followed; the text apart goes first."""
        if self.length:
            return
        text, end, place = self._text, len(self._text), self._before[-1]
        best = LEAST_MATCH - 1
        for _ in range(_MOST_PLACES):
            if not place:
                break
            needed = best if place < self.num_apart and self.length else best + 1
            is_followed = place != self.num_apart  # by more than the gap
            if is_followed and needed <= place and text[place - needed : place] == text[end - needed : end]:
                while needed < min(place, _MOST_NEEDED) and text[place - needed - 1] == text[end - needed - 1]:
                    needed += 1
                best = self.length = needed
                self.place = place
            place = self._before[place]

    def following(self, count: int) -> Tokens:
        """What followed the match, ``count`` tokens at most; what reaches the text's end is taken to repeat itself."""
        text, place = self._text, self.place
        period = len(text) - place
        return tuple(takewhile(lambda token: token != _GAP, (text[place + i % period] for i in range(count))))


def point_mass(token: int) -> Candidates:
    """What a token was drawn from that was not drawn: itself."""
    return Candidates((token,), (1.0,))


def look_up_for(spec: SequenceSpec, options: LookUpOptions | None) -> LookUp | None:
    """The look-up of a new sequence; None where it has none."""
    if options is None or not (options.for_all or spec.prediction):
        return None
    most = options.most if spec.num_speculative_tokens is None else spec.num_speculative_tokens
    return LookUp(spec, most) if most else None


class LookUp:
    """The look-up of one sequence: it drafts as far as the match is long, and after wrong drafts asks for longer ones.

    Args:
        spec: Of the sequence.
        most: Draft tokens of a round, at most.
    """

    __slots__ = ("_ending", "_index", "_most", "_needed", "_num_read", "_spec")

    def __init__(self, spec: SequenceSpec, most: int) -> None:
        self._spec = spec
        self._most = most
        self._ending = spec.ending_token_ids
        self._index = TextIndex(spec.prediction)
        self._needed = LEAST_MATCH
        self._num_read = 0

    @property
    def is_long(self) -> bool:
        """Whether the newest match is so long that it goes before a draft model's offer."""
        return self._index.length >= LONG_MATCH

    def draft(self, log: TokenLog, room: int) -> Draft:
        """What may follow a log, which only grows from call to call; ``room`` tokens at most."""
        index = self._index
        new = log.tokens[self._num_read : self._num_read + _MOST_READ]
        index.extend(new)
        self._num_read += len(new)
        if self._num_read < len(log):
            return NO_DRAFT
        if self._spec.prediction and len(log) == self._spec.output_start:
            index.expect(LONG_MATCH)
        index.find()
        count = min(self._most, room, index.length)
        if index.length < self._needed or count <= 0:
            return NO_DRAFT
        tokens = self._cut(index.following(count))
        is_rejection = self._spec.sampling.acceptance == "rejection"
        candidates = tuple(map(point_mass, tokens)) if is_rejection else ()
        return Draft(tokens, candidates, "prediction" if index.place < index.num_apart else "lookup")

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a round: a draft of which little was right doubles what a match must have.

        Little is less than half of it, and less than so many tokens as a match must have at the least.
        """
        is_right = num_accepted >= min(LEAST_MATCH, num_drafted / 2)
        self._needed = LEAST_MATCH if is_right else min(2 * self._needed, _MOST_NEEDED)

    def _cut(self, tokens: Tokens) -> Tokens:
        """Up to the first token that would end the sequence, that included."""
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in self._ending), tokens)
