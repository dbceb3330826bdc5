"""Text from tokens as they come, never half a character: detokenizing, stop strings, the text and bill of a sequence.

The text and the bytes of single tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.core.params import SequenceSpec
from specdec.core.types import Finish

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
        """Forget the oldest tokens if the rest decodes to the same end.

        If the rest has no text of its own, a decoder would take what follows for the start: then forget the rest.
        """
        held = text[len(self._shown) :]
        rest = self._decode(self._window[-_CONTEXT:])
        if rest.endswith(held) and len(rest) > len(held):
            self._shown = rest[: len(rest) - len(held)]
            self._num_clean = max(0, self._num_clean - (len(self._window) - _CONTEXT))
            del self._window[:-_CONTEXT]
            return
        while len(self._window) > _MOST_TOKENS and self._decode(self._window[:-_CONTEXT]) == text:
            del self._window[-_CONTEXT:]
        self._num_clean = min(self._num_clean, len(self._window))

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

    def push(self, piece: str, may_stop: bool = True) -> StopScan:
        """Take the next piece of text. Must not be called again once a stop string was found.

        Args:
            piece: The text.
            may_stop: Whether a stop string that this piece completes counts. One that begins in a piece in which none
                counts, and is completed in a later piece, does.
        """
        if not self._automata:
            return StopScan(piece)
        for index, character in enumerate(piece):
            for automaton in self._automata:
                if not automaton.push(character):
                    continue
                if not may_stop:
                    automaton.read_on()
                else:
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

    def read_on(self) -> None:
        """Go on after the pattern was completed: its end may begin another."""
        self.num_matched = self._fallback[-1]


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
    target says about tokens after it. Stop strings, like stop tokens, do not end a sequence before ``min_tokens``: one
    that is completed earlier does not count, one that only begins earlier does. The token that ended the sequence (an
    end-of-sequence or stop token) is billed, but gives no text unless ``includes_stop``.

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
        """Count a token and scan its text. Before ``min_tokens`` no stop string is completed, but one may begin."""
        self._num_tokens += 1
        self._num_characters += len(piece)
        return self._scan(piece, self._num_tokens >= self._spec.sampling.min_tokens)

    def _scan(self, piece: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that is certain, and the stop string that it completed, if it is one's end."""
        text, stop = self._scanner.push(piece, may_stop)
        return (text + stop if stop is not None and self._includes_stop else text), stop

    def _read_rest(self) -> tuple[str, str | None]:
        """What the detokenizer and the scanner held back."""
        text, stop = self._scan(self._detokenizer.finish())
        return (text, stop) if stop is not None else (text + self._scanner.finish(), None)

    def _stop_token(self, tokens: Sequence[int], finish: Finish) -> int | None:
        if finish == "stop" and tokens and tokens[-1] in self._spec.sampling.stop_token_ids:
            return tokens[-1]
        return None
