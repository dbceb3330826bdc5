"""Rollback by scanning again: the state at a window's beginning and the scan's inputs since then are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.models.recurrent.scan import Scan, Tensors
from specdec.models.recurrent.step import RowGroup, StateRow, StateStep
from specdec.models.zeros import zeros

TensorShape = tuple[tuple[int, ...], torch.dtype]


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
        self._first = zeros((num_slots, *state_shape), torch.float32, device)
        self._last = zeros((num_slots, *state_shape), torch.float32, device)
        self._inputs = [zeros((num_slots, self._size, *shape), dtype, device) for shape, dtype in input_shapes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.nbytes for pool in (self._first, self._last, *self._inputs))

    def clear(self, slot: int) -> None:
        """Make a slot that of an empty sequence."""
        self._first[slot] = 0
        self._last[slot] = 0

    def copy(self, source: int, destination: int) -> None:
        """Make a slot like another."""
        for pool in (self._first, self._last, *self._inputs):
            pool[destination] = pool[source]

    def run(self, scan: Scan, step: StateStep) -> torch.Tensor:
        """Scan every row from its own state: outputs [1, N, ...]."""
        groups = step.groups(scan.inputs[0].device)
        results = [self._run_group(scan, step, index, group) for index, group in enumerate(groups)]
        if len(groups) == 1 and not groups[0].is_padded:
            return results[0].flatten(0, 1).unsqueeze(0)
        outputs = results[0].new_empty((1, step.num_tokens, *results[0].shape[2:]))
        for group, result in zip(groups, results, strict=True):
            group.put(result, outputs)
        return outputs

    def _run_group(self, scan: Scan, step: StateStep, index: int, group: RowGroup) -> torch.Tensor:
        """Outputs [B, T, ...]."""
        device = self._last.device
        slots = step.memo(("slots", index, device), lambda: torch.tensor([r.slot for r in group.rows], device=device))
        state = self._last.index_select(0, slots)
        cut = [i for i, row in enumerate(group.rows) if row.newest != row.num_past_tokens]
        if cut:
            rows = [group.rows[i] for i in cut]
            state[cut] = self._again(scan, rows, [row.num_past_tokens for row in rows])
        lead = max(0, group.num_tokens - step.window.num_tokens)
        moved = [row for row in group.rows if row.oldest_after > row.oldest] if not lead else []
        if moved:
            self._first[[row.slot for row in moved]] = self._again(scan, moved, [row.oldest_after for row in moved])
        self._keep(scan, step, index, group)
        inputs, reads = (tuple(group.take(value) for value in values) for values in (scan.inputs, scan.reads))
        outputs: list[torch.Tensor] = []
        if lead:
            some, rest = (tuple(value[:, :lead] for value in values) for values in (inputs, reads))
            output, state = scan.whole(some, rest, state)
            outputs.append(output)
            self._first.index_copy_(0, slots, state.float())
            inputs, reads = (tuple(value[:, lead:] for value in values) for values in (inputs, reads))
        if group.is_padded:
            inputs = scan.neutral(inputs, group.is_padding)
        stepped = []
        for output, after in scan.steps(inputs, reads, state):
            stepped.append(output)
            state = after
        self._last.index_copy_(0, slots, state.float())
        outputs.append(torch.stack(stepped, dim=1))
        return outputs[0] if len(outputs) == 1 else torch.cat([value.to(outputs[-1].dtype) for value in outputs], dim=1)

    def _again(self, scan: Scan, rows: list[StateRow], lengths: list[int]) -> torch.Tensor:
        """States of rows at lengths within their windows, [B, ...], from their kept inputs."""
        state = self._first[[row.slot for row in rows]]
        counts = [length - row.oldest for row, length in zip(rows, lengths, strict=True)]
        most = max(counts)
        if not most:
            return state
        device = state.device
        entries = [row.slot * self._size + (row.oldest + i) % self._size for row in rows for i in range(most)]
        indices = torch.tensor(entries, device=device)
        inputs: Tensors = tuple(
            pool.flatten(0, 1).index_select(0, indices).view(len(rows), most, *pool.shape[2:]) for pool in self._inputs
        )
        is_beyond = torch.arange(most, device=device) >= torch.tensor(counts, device=device)[:, None]
        return scan.advance(scan.neutral(inputs, is_beyond), state).float()

    def _keep(self, scan: Scan, step: StateStep, index: int, group: RowGroup) -> None:
        """Keep the inputs of each row's last tokens, position p at entry p mod twice the window."""
        device = self._last.device
        sources, places = step.memo(("kept", index, self._size, device), lambda: self._places(group, device))
        for pool, values in zip(self._inputs, scan.inputs, strict=True):
            pool.flatten(0, 1).index_copy_(0, places, values[0].index_select(0, sources))

    def _places(self, group: RowGroup, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        sources: list[int] = []
        places: list[int] = []
        for row in group.rows:
            for offset in range(max(0, row.num_new_tokens - self._size), row.num_new_tokens):
                sources.append(row.start + offset)
                places.append(row.slot * self._size + (row.num_past_tokens + offset) % self._size)
        return torch.tensor(sources, device=device), torch.tensor(places, device=device)
