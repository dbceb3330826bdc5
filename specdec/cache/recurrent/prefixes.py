"""Copies of recurrent states at block borders, so that prompts that begin alike are read once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.cache.recurrent.slots import SequenceState

MIN_DISTANCE_TOKENS = 256
"""A sequence leaves no copy nearer than this to its last one: a copy costs as much as a state takes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    state: SequenceState
    digests: tuple[bytes, ...]


class PrefixStates:
    """Which state slot holds what a prefix leaves behind. Numbers only, no tensors.

    A copy serves every block border that its state can be brought back to. They are let go least recently used first.

    Args:
        most: Copies at once; 0 keeps none.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._slot_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, digest: object) -> bool:
        return digest in self._slot_of

    def is_wanted(self, state: SequenceState, digests: Sequence[bytes], block_size: int) -> bool:
        """Whether a copy of a state is worth its slot, given the digests of its sequence's verified full blocks."""
        border = len(digests) * block_size
        if not self.most or not digests or state.oldest > border or digests[-1] in self._slot_of:
            return False
        return not state.kept or border - state.kept >= MIN_DISTANCE_TOKENS

    def add(self, state: SequenceState, digests: Sequence[bytes], block_size: int) -> None:
        """Keep a copy, for all borders from its ``oldest`` to that of the last digest."""
        first = max(1, -(-state.oldest // block_size))
        borders = tuple(digest for digest in digests[first - 1 :] if digest not in self._slot_of)
        self._kept[state.slot] = _Kept(state, borders)
        self._slot_of.update(dict.fromkeys(borders, state.slot))

    def find(self, digest: bytes) -> SequenceState:
        """The copy for a border, now the most recently used."""
        slot = self._slot_of[digest]
        self._kept.move_to_end(slot)
        return self._kept[slot].state

    def pop(self) -> SequenceState | None:
        """Let go of the least recently used; None if there is none."""
        if not self._kept:
            return None
        _, kept = self._kept.popitem(last=False)
        for digest in kept.digests:
            del self._slot_of[digest]
        return kept.state
