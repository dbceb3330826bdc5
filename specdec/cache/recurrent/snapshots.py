"""Rollback by snapshot and replay, for models whose state can be copied as a whole, but not looked into.

A sequence has whatever its model returns as its state, and copies of it at one or two earlier lengths. It is brought
back by taking the nearest copy before and reading the tokens since then once more, one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.cache.recurrent.slots import SequenceState, StateSlots, Window
from specdec.core.tokens import TokenSequence, as_list

Reader = Callable[[list[int], int, Any], tuple[torch.Tensor, Any]]
"""From tokens, the position of the first, and the state before it, to their logits [n, V] and the state after."""


@dataclass(slots=True)
class _Held:
    """What is held for one slot.

    Attributes:
        state: The model's own, after ``length`` tokens; None before the first.
        length: Tokens it has seen.
        copies: Earlier lengths and the states there, the oldest first; at most two.
    """

    state: Any = None
    length: int = 0
    copies: list[tuple[int, Any]] = field(default_factory=list)


class SnapshotPool:
    """States of many sequences, each a Python object of its model's.

    Args:
        num_slots: Most sequences and branches at once.
        window: How far back they can go.
        reads_many: Whether the model goes on right from a state with several tokens at once; else they are read one
            by one, but for those at a sequence's beginning.
    """

    def __init__(self, num_slots: int, window: Window, reads_many: bool) -> None:
        self.window = window
        self.slots = StateSlots(num_slots)
        self._reads_many = reads_many
        self._held: dict[int, _Held] = {}

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return self.slots.num_free

    @property
    def num_in_use(self) -> int:
        """Slots some sequence or branch holds."""
        return self.slots.num_in_use

    @property
    def num_reusable(self) -> int:
        """Slots kept only for prefix reuse: none."""
        return 0

    def take(self) -> SequenceState | None:
        """The state of an empty sequence; None where no slot is free."""
        state = self.slots.take()
        if state is not None:
            self._held[state.slot] = _Held(copies=[(0, None)])
        return state

    def copy(self, state: SequenceState) -> SequenceState | None:
        """A state of its own that can be brought back like ``state``; None where no slot is free."""
        other = self.slots.take()
        if other is not None:
            other.oldest, other.newest = state.oldest, state.newest
            self._held[other.slot] = copy.deepcopy(self._held[state.slot])
        return other

    def give_back(self, state: SequenceState) -> None:
        """Free a state's slot."""
        self.slots.give_back(state)
        del self._held[state.slot]

    def read(self, state: SequenceState, past: TokenSequence, tokens: list[int], reader: Reader) -> torch.Tensor:
        """Bring a state to ``past`` and read ``tokens`` after it: their logits [n, V]."""
        held = self._held[state.slot]
        length = len(past)
        if held.length != length:
            held.copies = [entry for entry in held.copies if entry[0] <= length]
            held.length, kept = held.copies[-1]
            held.state = copy.deepcopy(kept)
            self._advance(held, as_list(past[held.length :]), reader)
        if length - held.copies[-1][0] >= self.window.num_tokens:
            held.copies = [held.copies[-1], (length, copy.deepcopy(held.state))]
        logits = self._advance(held, tokens, reader)
        state.oldest, state.newest = held.copies[0][0], held.length
        return logits

    def _advance(self, held: _Held, tokens: list[int], reader: Reader) -> torch.Tensor:
        """Read tokens at the state's end."""
        at_once = self._reads_many or held.length == 0
        parts = [tokens] if at_once else [[token] for token in tokens]
        logits = []
        for part in parts:
            if part:
                values, held.state = reader(part, held.length, held.state)
                held.length += len(part)
                logits.append(values)
        return torch.cat(logits) if logits else torch.empty(0)
