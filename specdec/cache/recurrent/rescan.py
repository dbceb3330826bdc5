"""Rollback by scanning again: the state at a window's beginning and the scan's inputs since then are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.kernels.recurrent import KeptStates
from specdec.kernels.recurrent_metadata import ScanGroup, StateRow, StateStep
from specdec.kernels.scan import Scan, Tensors

TensorShape = tuple[tuple[int, ...], torch.dtype]
Span = tuple[int, int, int]
"""Kept inputs of one slot: the slot, the first position, the end."""


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a group's rows begin; int64, made once per step.

    Attributes:
        slots: [B], of the rows.
        cut: Which of the rows were cut back since their last step.
        cut_slots: The slots of those.
    """

    slots: torch.Tensor
    cut: torch.Tensor
    cut_slots: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[StateRow], device: torch.device) -> _Start:
        cut = [i for i, row in enumerate(rows) if row.is_cut_back]
        lists = [row.slot for row in rows], cut, [rows[i].slot for i in cut]
        return cls(*(torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in lists))


class Rescan:
    """Two states of one scan per slot, at the window's beginning and at its end, and the inputs between them.

    After a sequence was cut back, the next step scans its kept inputs once more from the window's beginning, with
    those beyond its length made neutral: rows cut back differently share that scan, and no other layer runs.

    Args:
        state_shape: Of one state.
        input_shapes: Shape and dtype of one token's inputs, each.
        num_slots: Slots.
        num_tokens: The window; twice as many inputs are kept, so that its beginning moves now and then only.
        device: Of all of it; states are float32.

    Attributes:
        kept: All of it.
    """

    def __init__(
        self,
        state_shape: tuple[int, ...],
        input_shapes: Sequence[TensorShape],
        num_slots: int,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        self._size = 2 * num_tokens
        self._first, self._last = (torch.zeros(num_slots, *state_shape, device=device) for _ in range(2))
        self._inputs = [
            torch.zeros(num_slots, self._size, *shape, dtype=dtype, device=device) for shape, dtype in input_shapes
        ]
        self.kept = KeptStates(self._first, self._last, self._inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.nbytes for pool in (self._first, self._last, *self._inputs))

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots those of empty sequences, inputs too: what is neutral is multiplied, and must be finite."""
        for pool in (self._first, self._last, *self._inputs):
            for slot in slots:
                pool[slot].zero_()  # a list as an index would be uploaded

    def copy(self, source: int, destination: int) -> None:
        """Make a slot like another."""
        for pool in (self._first, self._last, *self._inputs):
            pool[destination] = pool[source]

    def run(self, scan: Scan, step: StateStep) -> torch.Tensor:
        """Scan every row from its own state: outputs [1, N, ...]."""
        return step.by_groups(scan.inputs[0].device, lambda index, group: self._run_group(scan, step, index, group))

    def _run_group(self, scan: Scan, step: StateStep, index: int, group: ScanGroup) -> torch.Tensor:
        """Outputs [B, T, ...]."""
        lead = max(0, group.num_tokens - step.window.num_tokens)
        if not lead:
            self._move(scan, step, index, group.rows)
        start = step.memo(("start", index, self._last.device), lambda: _Start.of(group.rows, self._last.device))
        state = self._states(start)
        again = self._kept(scan, step, ("again", index), lambda: _spans_again(group.rows, is_long=lead > 0))
        inputs, reads = (tuple(group.take(value) for value in values) for values in (scan.inputs, scan.reads))
        if group.is_padded:
            inputs = scan.neutral(inputs, group.is_padding)
        self._keep(scan, step, index, group)
        num_again = again[0].shape[1]
        if num_again:
            inputs = tuple(torch.cat(pair, dim=1) for pair in zip(again, inputs, strict=True))
            reads = tuple(torch.cat([_nothing(read, again[0]), read], dim=1) for read in reads)
        if not lead:
            outputs, state = scan.few(inputs, reads, state)
        else:
            some, rest = (tuple(v[:, : num_again + lead] for v in values) for values in (inputs, reads))
            leading, state = scan.whole(some, rest, state)
            self._first.index_copy_(0, start.slots, state.float())
            some, rest = (tuple(v[:, num_again + lead :] for v in values) for values in (inputs, reads))
            outputs, state = scan.few(some, rest, state)
            outputs = torch.cat([leading.to(outputs.dtype), outputs], dim=1)
        self._last.index_copy_(0, start.slots, state.float())
        return outputs[:, num_again:]

    def _states(self, start: _Start) -> torch.Tensor:
        """Each row's state to begin with: that at its window's beginning if it was cut back, else that at its end."""
        if not len(start.cut):
            return self._last.index_select(0, start.slots)
        if len(start.cut) == len(start.slots):
            return self._first.index_select(0, start.slots)
        states = self._last.index_select(0, start.slots)
        return states.index_copy_(0, start.cut, self._first.index_select(0, start.cut_slots))

    def _move(self, scan: Scan, step: StateStep, index: int, rows: Sequence[StateRow]) -> None:
        """Bring the states at the windows' beginnings to where the windows begin now."""
        device = self._last.device
        moving, slots = step.memo(("moving", index, device), lambda: _moving(rows, device))
        if not moving:
            return
        spans = [(row.slot, row.oldest, row.oldest_after) for row in moving]
        inputs = self._kept(scan, step, ("moved", index), lambda: spans)
        reads = tuple(_nothing(read, inputs[0]) for read in scan.reads)
        _, states = scan.few(inputs, reads, self._first.index_select(0, slots))
        self._first.index_copy_(0, slots, states.float())

    def _kept(self, scan: Scan, step: StateStep, kind: tuple[str, int], spans: Callable[[], list[Span]]) -> Tensors:
        """Kept inputs of spans, filled up with neutral ones to the longest: [B, T, ...]."""
        device = self._last.device
        indices, is_beyond = step.memo((*kind, self._size, device), lambda: self._entries(spans(), device))
        inputs: Tensors = tuple(
            pool.flatten(0, 1).index_select(0, indices).view(*is_beyond.shape, *pool.shape[2:]) for pool in self._inputs
        )
        return scan.neutral(inputs, is_beyond)

    def _entries(self, spans: list[Span], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        most = max(end - first for _, first, end in spans)
        places = [slot * self._size + (first + i) % self._size for slot, first, _ in spans for i in range(most)]
        lengths = torch.tensor([end - first for _, first, end in spans], device=device)
        is_beyond = torch.arange(most, device=device) >= lengths[:, None]
        return torch.tensor(places, dtype=torch.long, device=device), is_beyond

    def _keep(self, scan: Scan, step: StateStep, index: int, group: ScanGroup) -> None:
        """Keep the inputs of each row's last tokens, position p at entry p mod twice the window."""
        device = self._last.device
        sources, places = step.memo(("kept", index, self._size, device), lambda: self._places(group, device))
        for pool, values in zip(self._inputs, scan.inputs, strict=True):
            pool.flatten(0, 1).index_copy_(0, places, values[0].index_select(0, sources))

    def _places(self, group: ScanGroup, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        sources: list[int] = []
        places: list[int] = []
        for row in group.rows:
            for offset in range(max(0, row.num_new_tokens - self._size), row.num_new_tokens):
                sources.append(row.start + offset)
                places.append(row.slot * self._size + (row.num_computed_tokens + offset) % self._size)
        return torch.tensor(sources, device=device), torch.tensor(places, device=device)


def _spans_again(rows: Sequence[StateRow], is_long: bool) -> list[Span]:
    """What rows that were cut back scan again before their new tokens; nothing for the others."""
    return [
        (row.slot, row.oldest if is_long else row.oldest_after, row.num_computed_tokens)
        if row.is_cut_back
        else (row.slot, 0, 0)
        for row in rows
    ]


def _moving(rows: Sequence[StateRow], device: torch.device) -> tuple[list[StateRow], torch.Tensor]:
    """The rows whose window begins later after this step, and their slots, int64."""
    moving = [row for row in rows if row.oldest_after > row.oldest]
    return moving, torch.tensor([row.slot for row in moving], dtype=torch.int64, device=device)


def _nothing(read: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Zeros for what outputs nobody wants depend on, for as many rows and tokens as ``inputs`` have."""
    return read.new_zeros((*inputs.shape[:2], *read.shape[2:]))
