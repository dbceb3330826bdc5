"""The text of one sequence: detokenizing, stop strings and the bill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.sampling.params import SequenceSpec
from specdec.text.detokenizer import Detokenizer
from specdec.text.stops import StopScanner
from specdec.types import Finish

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens brought.

    Attributes:
        text: New text, final; may be empty while a character or a stop string is unfinished.
        num_billed: How many of the tokens count: all, or those up to and including the one that completed a stop
            string. The others are beyond the end, and are thrown away.
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


class OutputText:
    """Turns the committed tokens of one sequence into text, and finds its end.

    Tokens are walked one by one: a stop string ends the sequence at the token that completes it, before anything the
    target says about tokens after it. Stop strings, like stop tokens, do not end a sequence before ``min_tokens``. The
    token that ended the sequence (an end-of-sequence or stop token) is billed, but gives no text.

    Args:
        tokenizer: Any fast tokenizer of transformers.
        prompt: The prompt's tokens, for the context of the first output token.
        spec: The sequence's limits.
        stops: Stop strings.
        skip_special_tokens: Leave special tokens out of the text.
        tells_offsets: Say where each token's text begins.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        spec: SequenceSpec,
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
        tells_offsets: bool = True,
    ) -> None:
        self._spec = spec
        self._walks = bool(stops) or tells_offsets
        self._ending = spec.ending_token_ids
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
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
                self._finished = True
                return TextDelta("".join(texts), index + 1, tuple(offsets), "stop", stop)
        if finish is None:
            return TextDelta("".join(texts), len(tokens), tuple(offsets))
        self._finished = True
        text, stop = self._read_rest()
        texts.append(text)
        reason = stop if stop is not None else self._stop_token(tokens, finish)
        return TextDelta("".join(texts), len(tokens), tuple(offsets), "stop" if stop is not None else finish, reason)

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
        return (piece, None) if self._num_tokens < self._spec.sampling.min_tokens else self._scanner.push(piece)

    def _read_rest(self) -> tuple[str, str | None]:
        """What the detokenizer and the scanner held back."""
        scan = self._scanner.push(self._detokenizer.finish())
        return (scan.text, scan.stop) if scan.stop is not None else (scan.text + self._scanner.finish(), None)

    def _stop_token(self, tokens: Sequence[int], finish: Finish) -> int | None:
        if finish == "stop" and tokens and tokens[-1] in self._spec.sampling.stop_token_ids:
            return tokens[-1]
        return None
