"""How often each token stands in a sequence, kept between steps: only what is new in a long log is counted."""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenBuffer, TokenSequence, as_array, as_list, common_prefix_length
from specdec.sampling.rows import RowGroup

_MAX_KEPT_TOKENS = 1 << 21
_LEAST_SIZE = 64
"""What an empty history takes, in tokens."""


class Counted(NamedTuple):
    """What penalties have to know of one group; U is at least 1.

    Attributes:
        ids: int64 [U], distinct: the prompt's tokens where they are listed, then the output's, then the draft's.
        counts: float32 [U]: how often each stands in the output before the group's first row.
        seen: bool [U]: whether it stands there or in the prompt.
        places: Where in ``ids`` each draft token is; -1 for one outside the vocabulary.
        undrafted: Where in ``ids`` there is a token that is not in the draft; 0 if that is none of the vocabulary.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.float32]
    seen: NDArray[np.bool_]
    places: list[int]
    undrafted: int


class History:
    """The distinct tokens of one log, and how often each stands in its output.

    Args:
        prompt: The log's first tokens.
        lists_prompt: Whether its ids are wanted.
        vocab_size: V; ids outside [0, V) are left out.
    """

    def __init__(self, prompt: TokenSequence, lists_prompt: bool, vocab_size: int) -> None:
        self._prompt = as_array(prompt)
        self._output = TokenBuffer()
        self._vocab_size = vocab_size
        self._ids = array(
            "q", (i for i in dict.fromkeys(as_list(prompt) if lists_prompt else ()) if 0 <= i < vocab_size)
        )
        self._counts = array("q", bytes(8 * len(self._ids)))
        self._places = {token: place for place, token in enumerate(self._ids)}
        self._num_prompt_ids = len(self._ids)

    @property
    def size(self) -> int:
        """Memory, in tokens."""
        return _LEAST_SIZE + len(self._prompt) + len(self._output)

    def has_prompt_of(self, log: TokenSequence) -> bool:
        """Whether the log begins with this history's prompt."""
        return np.array_equal(log[: len(self._prompt)], self._prompt)

    def move_to(self, log: TokenSequence) -> None:
        """Become the history of ``log``, which has the same prompt, by the tokens in which the two outputs differ."""
        output, known = log[len(self._prompt) :], self._output
        kept = common_prefix_length(known.array, output)
        new = as_list(output[kept:])
        for token in reversed(known.array[kept:].tolist()):
            self._pop(token)
        for token in new:
            self._push(token)
        known.truncate(kept)
        known.extend(new)

    def counted(self, draft: tuple[int, ...]) -> Counted:
        """A copy of the counts, with places for a draft's tokens."""
        new: dict[int, int] = {}
        places = []
        for token in draft:
            place = self._places.get(token, -1)
            if place < 0 and 0 <= token < self._vocab_size:
                place = new.setdefault(token, len(self._ids) + len(new))
            places.append(place)
        num_ids = len(self._ids) + len(new)
        undrafted = next((place for place in range(num_ids) if place not in places), 0)
        if undrafted in places or not num_ids:
            # All ids are drafted, so they are few: one more, with nothing to count.
            spare = next((i for i in range(self._vocab_size) if i not in self._places and i not in new), None)
            if spare is not None:
                undrafted = new[spare] = num_ids
        ids = np.concatenate((np.frombuffer(self._ids, np.int64), np.array([*new], dtype=np.int64)))
        counts = np.zeros(len(ids), dtype=np.float32)
        counts[: len(self._ids)] = np.frombuffer(self._counts, np.int64)
        seen = counts > 0
        seen[: self._num_prompt_ids] = True
        return Counted(ids, counts, seen, places, undrafted)

    def _push(self, token: int) -> None:
        place = self._places.get(token)
        if place is not None:
            self._counts[place] += 1
        elif 0 <= token < self._vocab_size:
            self._places[token] = len(self._ids)
            self._ids.append(token)
            self._counts.append(1)

    def _pop(self, token: int) -> None:
        """Take back the newest token."""
        place = self._places.get(token)
        if place is None:
            return
        self._counts[place] -= 1
        if self._counts[place] == 0 and place >= self._num_prompt_ids:
            # Listed when it first came: whatever was listed after it came later, and is gone.
            assert place == len(self._ids) - 1
            del self._places[token]
            self._ids.pop()
            self._counts.pop()


class TokenCounts:
    """The histories used last. What is found is compared token by token, so nothing rests on how it was found.

    Args:
        max_kept_tokens: Size of all histories together, each at least 64; those unused for longest go first.
    """

    def __init__(self, max_kept_tokens: int = _MAX_KEPT_TOKENS) -> None:
        self._max_kept_tokens = max_kept_tokens
        # By the sequence's own object: other sequences may have the same seed and as long a prompt.
        self._kept: OrderedDict[int, tuple[weakref.ref[SequenceSpec], History]] = OrderedDict()
        self._num_tokens = 0

    def counted(self, group: RowGroup, vocab_size: int) -> Counted:
        """The counts before a group's first row."""
        spec = group.spec
        owner, history = self._kept.pop(id(spec), (None, None))
        if history is not None:
            self._num_tokens -= history.size
        if history is None or owner is None or owner() is not spec or not history.has_prompt_of(group.tokens):
            lists_prompt = spec.sampling.repetition_penalty != 1
            history = History(group.tokens[: spec.output_start], lists_prompt, vocab_size)
        history.move_to(group.tokens)
        self._kept[id(spec)] = weakref.ref(spec), history
        self._num_tokens += history.size
        while self._num_tokens > self._max_kept_tokens and len(self._kept) > 1:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._num_tokens -= oldest.size
        return history.counted(group.draft)
