"""Which state slot belongs to which sequence, and how far back it reaches. Numbers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_WINDOW_TOKENS = 18
"""Twice a draft of eight tokens and the bonus token: what a drafter that runs ahead may have to take back."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """The recurrent state of one sequence.

    Attributes:
        slot: Where its tensors are.
        oldest: Smallest length it can be brought back to without reading tokens anew (but for 0, which always can).
        newest: Length whose state was computed last.
        kept: Length at which it last left a copy for others that begin like it; 0: never.
    """

    slot: int
    oldest: int = 0
    newest: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """How far back states reach.

    Attributes:
        num_tokens: A sequence can go back at least this many tokens from the greatest length it has had.
    """

    num_tokens: int

    @property
    def num_kept_tokens(self) -> int:
        """Most tokens between ``oldest`` and the end: twice the window, as moving its beginning costs a scan."""
        return 2 * self.num_tokens

    def oldest_after(
        self, oldest: int, num_computed_tokens: int, num_new_tokens: int, *, is_scanned_again: bool = False
    ) -> int:
        """Where the window begins after ``num_new_tokens`` more tokens.

        What lies between its beginning and the tokens is scanned again after each cut. Where a step does that anyway,
        and passes by the new beginning (``is_scanned_again``), moving it costs nothing.
        """
        length = num_computed_tokens + num_new_tokens
        is_long = num_new_tokens > self.num_tokens or length - oldest > self.num_kept_tokens
        if is_long or is_scanned_again:
            return max(oldest, length - self.num_tokens)
        return oldest


class StateSlots:
    """A fixed number of slots, one per sequence or branch.

    Args:
        num_slots: At least 1.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        """Slots some sequence holds."""
        return self.num_slots - len(self._free)

    def take(self) -> SequenceState | None:
        """A slot for an empty sequence; None where there is none."""
        return SequenceState(self._free.pop()) if self._free else None

    def give_back(self, state: SequenceState) -> None:
        """Free a slot."""
        assert state.slot not in self._free, f"slot {state.slot} is free already"
        self._free.append(state.slot)
