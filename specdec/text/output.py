"""The text of one sequence: detokenizing, stop strings and the bill.

Stop strings, found in text that comes in pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specdec.core.params import SequenceSpec
from specdec.core.types import Finish
from specdec.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens brought.

    Attributes:
        text: New text, final; may be empty while a character or a stop string is unfinished.
        num_billed: How many of the tokens count: all, or those up to and including the one that completed a stop
            string. The others are beyond the end, and are thrown away.
        num_shown: How many tokens, of these and earlier ones, begin within the text that is out: those that complete a
            stop string which is not part of the text never do.
        offsets: For each billed token, the number of characters of the whole text before it; empty where not asked
            for.
        finish: Why the text ended, if it did.
        stop_reason: The stop string or the stop token id that ended it; None for the model's own end.
    """

    text: str
    num_billed: int
    offsets: tuple[int, ...]
    finish: Finish | None = None
    stop_reason: str | int | None = None
    num_shown: int = 0


class OutputText:
    """Turns the committed tokens of one sequence into text, and finds its end.

    Tokens are walked one by one: a stop string ends the sequence at the token that completes it, before anything the
    target says about tokens after it. Stop strings, like stop tokens, do not end a sequence before ``min_tokens``. The
    token that ended the sequence (an end-of-sequence or stop token) is billed, but gives no text unless
    ``includes_stop``.

    Args:
        tokenizer: Any fast tokenizer of transformers.
        prompt: The prompt's tokens, for the context of the first output token.
        spec: The sequence's limits.
        stops: Stop strings.
        skip_special_tokens: Leave special tokens out of the text.
        tells_offsets: Say where each token's text begins, and how many are shown.
        includes_stop: Stop strings, and the tokens that end a sequence, are part of the text.
        kept: Special tokens that are part of the text in any case.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        spec: SequenceSpec,
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
        tells_offsets: bool = True,
        includes_stop: bool = False,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._spec = spec
        self._walks = bool(stops) or tells_offsets
        # Of what ends the sequence, and gives no text.
        self._ending = frozenset() if includes_stop else spec.ending_token_ids
        self._includes_stop = includes_stop
        self._unshown: deque[int] = deque()
        self._num_sent = 0
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens, kept)
        self._scanner = StopScanner(stops)
        self._num_tokens = 0
        self._num_characters = 0
        self._finished = False

    def push(self, tokens: Sequence[int], finish: Finish | None = None) -> TextDelta:
        """Take new tokens, in order, and what the target said of the end after the last of them."""
        assert not self._finished, "the sequence has ended"
        if not self._walks:
            return self._push_at_once(tokens, finish)
        texts: list[str] = []
        offsets: list[int] = []
        for index, token in enumerate(tokens):
            offsets.append(self._num_characters)
            ends_here = finish == "stop" and index == len(tokens) - 1 and token in self._ending
            text, stop = self._read("" if ends_here else self._detokenizer.push(token))
            texts.append(text)
            if stop is not None:
                return self._delta(texts, index + 1, offsets, "stop", stop)
        if finish is None:
            return self._delta(texts, len(tokens), offsets)
        text, stop = self._read_rest()
        texts.append(text)
        if stop is not None:
            return self._delta(texts, len(tokens), offsets, "stop", stop)
        return self._delta(texts, len(tokens), offsets, finish, self._stop_token(tokens, finish))

    def _delta(
        self,
        texts: list[str],
        num_billed: int,
        offsets: list[int],
        finish: Finish | None = None,
        stop_reason: str | int | None = None,
    ) -> TextDelta:
        """What a push brought, once it is known which of the tokens are shown."""
        text = "".join(texts)
        self._num_sent += len(text)
        self._unshown += offsets
        self._finished = finish is not None
        # The text of a sequence that did not end by a stop string is whole: all of its tokens belong to it.
        shows_all = self._finished and not isinstance(stop_reason, str)
        num_shown = 0
        while self._unshown and (shows_all or self._unshown[0] < self._num_sent):
            self._unshown.popleft()
            num_shown += 1
        return TextDelta(text, num_billed, tuple(offsets), finish, stop_reason, num_shown)

    def _push_at_once(self, tokens: Sequence[int], finish: Finish | None) -> TextDelta:
        """The same where no stop string may end the text between two of the tokens."""
        ends_here = finish == "stop" and bool(tokens) and tokens[-1] in self._ending
        text = self._detokenizer.push_all(tokens[:-1] if ends_here else tokens)
        if finish is None:
            return TextDelta(text, len(tokens), ())
        self._finished = True
        return TextDelta(text + self._detokenizer.finish(), len(tokens), (), finish, self._stop_token(tokens, finish))

    def _read(self, piece: str) -> tuple[str, str | None]:
        """Count a token and scan its text, once stop strings are allowed to end the sequence."""
        self._num_tokens += 1
        self._num_characters += len(piece)
        return (piece, None) if self._num_tokens < self._spec.sampling.min_tokens else self._scan(piece)

    def _scan(self, piece: str) -> tuple[str, str | None]:
        """Text that is certain, and the stop string that it completed, if it is one's end."""
        text, stop = self._scanner.push(piece)
        return (text + stop if stop is not None and self._includes_stop else text), stop

    def _read_rest(self) -> tuple[str, str | None]:
        """What the detokenizer and the scanner held back."""
        text, stop = self._scan(self._detokenizer.finish())
        return (text, stop) if stop is not None else (text + self._scanner.finish(), None)

    def _stop_token(self, tokens: Sequence[int], finish: Finish) -> int | None:
        if finish == "stop" and tokens and tokens[-1] in self._spec.sampling.stop_token_ids:
            return tokens[-1]
        return None
