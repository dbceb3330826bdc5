"""Stop strings, found in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopScan(NamedTuple):
    """What a piece of text brought.

    Attributes:
        text: Text that is now certain not to be the beginning of a stop string.
        stop: The stop string that was completed; nothing after it counts.
    """

    text: str
    stop: str | None = None


class StopScanner:
    """Looks for the stop string that is completed first, and holds back what could be the beginning of one.

    The text is read character by character (Knuth, Morris and Pratt 1977, one automaton per stop string), so the
    answer does not depend on how the text was cut into pieces, and a piece of c characters costs O(c) per stop string.
    Of two that are completed by the same character, the longer wins.

    Args:
        stops: The strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, piece: str) -> StopScan:
        """Take the next piece of text. Must not be called again once a stop string was found."""
        if not self._automata:
            return StopScan(piece)
        for index, character in enumerate(piece):
            for automaton in self._automata:
                if automaton.push(character):
                    text = self._held + piece[: index + 1]
                    self._held = ""
                    return StopScan(text[: -len(automaton.pattern)], automaton.pattern)
        text = self._held + piece
        certain = len(text) - max(automaton.num_matched for automaton in self._automata)
        self._held = text[certain:]
        return StopScan(text[:certain])

    def finish(self) -> str:
        """Return what was held back: the text has ended."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of a pattern the text read so far ends with."""

    __slots__ = ("_fallback", "num_matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._fallback = _prefix_function(pattern)

    def push(self, character: str) -> bool:
        """Read a character; whether it completes the pattern."""
        while self.num_matched and self.pattern[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += self.pattern[self.num_matched] == character
        return self.num_matched == len(self.pattern)


def _prefix_function(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(pattern)
    for i in range(1, len(pattern)):
        k = lengths[i - 1]
        while k and pattern[i] != pattern[k]:
            k = lengths[k - 1]
        lengths[i] = k + (pattern[i] == pattern[k])
    return lengths
