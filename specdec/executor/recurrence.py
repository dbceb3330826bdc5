"""What a model's recurrent layers are told of each pass: whose state each of its rows moves, from where to where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.cache.recurrent.pool import StatePool
from specdec.cache.recurrent.slots import SequenceState, Window
from specdec.executor.rows import RowInput
from specdec.executor.tiles import RowPart
from specdec.kernels.recurrent import StateTensors
from specdec.kernels.recurrent_metadata import StateRow, StateStep, reads_ahead

Move = tuple[SequenceState, StateRow]
"""A sequence's state, and what a pass makes of it."""


class Recurrence:
    """Tells recurrent layers of passes.

    Args:
        states: The layers'; None where a model has none: then nothing is done.
        is_filled_up: Whether passes have more tokens than their rows: what fills them up has a state, too.
        has_fast_scans: Whether a package's scans read long prompts, where that is allowed.
    """

    def __init__(self, states: StatePool | None, *, is_filled_up: bool, has_fast_scans: bool) -> None:
        self._states = states
        self._padding = states.take() if states is not None and is_filled_up else None
        self._has_fast_scans = has_fast_scans

    def moves(self, rows: Sequence[RowInput], parts: Sequence[RowPart], *, may_read_ahead: bool = False) -> list[Move]:
        """What a pass makes of each row's state; until :func:`keep_states` none can be gone on from.

        Args:
            rows: Of the step.
            parts: Those of the pass.
            may_read_ahead: Whether the pass is by kernels that go on behind what was read before, and not recorded.
        """
        moves: list[Move] = []
        if self._states is None:
            return moves
        for part in parts:
            sequence = rows[part.row].sequence
            state, past = sequence.state, len(sequence.tokens) + part.offset
            assert state is not None, "no state is reserved"
            has_kernels = self._states.kernels is not None
            after = state_row(part.start, part.num_tokens, past, state, self._states.window, has_kernels)
            moves.append((state, reads_ahead(after) if may_read_ahead and self._has_fast_scans else after))
        self._states.clear_taken()
        for state, after in moves:
            state.oldest = after.length + 1  # until the step is done there is nothing to go back to
        return moves

    def begin(self, moves: Sequence[Move], num_tokens: int, tensors: StateTensors | None) -> None:
        """The pass that comes next.

        Args:
            moves: Of its rows; none of a recorded one.
            num_tokens: Of the pass.
            tensors: Its rows, where only the device knows them.
        """
        if self._states is None:
            return
        rows = [after for _, after in moves]
        if tensors is not None:
            self._states.begin(tensors, [row for row in rows if row.num_ahead])
            return
        start = rows[-1].start + rows[-1].num_new_tokens
        if start < num_tokens:
            assert self._padding is not None
            rows.append(state_row(start, num_tokens - start, 0, self._padding, self._states.window))
        self._states.begin(StateStep(rows, num_tokens, self._states.window))


def keep_states(moves: Sequence[Move]) -> None:
    """Note what became of sequences' states."""
    for state, after in moves:
        state.oldest, state.newest = after.oldest_after, after.length


def state_row(
    start: int,
    num_new_tokens: int,
    num_computed_tokens: int,
    state: SequenceState,
    window: Window,
    has_kernels: bool = False,
) -> StateRow:
    """A row as the recurrent layers see it; kernels go over what was cut back in the step's own scan."""
    is_scanned_again = has_kernels and state.newest != num_computed_tokens
    return StateRow(
        start=start,
        num_new_tokens=num_new_tokens,
        num_computed_tokens=num_computed_tokens,
        slot=state.slot,
        oldest=state.oldest,
        newest=state.newest,
        oldest_after=window.oldest_after(
            state.oldest, num_computed_tokens, num_new_tokens, is_scanned_again=is_scanned_again
        ),
    )


def state_array(moves: Sequence[Move]) -> NDArray[np.int64]:
    """The rows as a step's input has them: [4, R]."""
    return np.array([(row.slot, row.oldest, row.newest, row.oldest_after) for _, row in moves], np.int64).T
