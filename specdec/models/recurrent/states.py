"""Rollback by selection: the state after every position of a window is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.models.recurrent.scan import Scan
from specdec.models.recurrent.step import ScanGroup, StateStep

MIN_IN_PLACE_BYTES = 1 << 18
"""States of at least this size are computed row by row on a CPU: what moves them then is memory, not calls."""


class EveryState:
    """States of one scan: that after position p of a sequence at entry p mod (window + 1) of its slot.

    Truncating costs nothing: the next step begins with the state of the length it finds.

    Args:
        state_shape: Of one state.
        num_slots: Slots.
        num_tokens: The window.
        device: Of the states, which are float32.
    """

    def __init__(self, state_shape: tuple[int, ...], num_slots: int, num_tokens: int, device: torch.device) -> None:
        self._size = num_tokens + 1
        self._pool = torch.zeros(num_slots, self._size, *state_shape, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self._pool.nbytes

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots those of empty sequences; other states are written before they are read."""
        self._pool[slots, 0] = 0

    def copy(self, source: int, destination: int) -> None:
        """Make a slot like another."""
        self._pool[destination] = self._pool[source]

    def run(self, scan: Scan, step: StateStep) -> torch.Tensor:
        """Scan every row from its own state, and keep the states of its last tokens: outputs [1, N, ...]."""
        device = scan.inputs[0].device
        if device.type == "cpu" and self._pool[0, 0].nbytes >= MIN_IN_PLACE_BYTES:
            return self._run_in_place(scan, step)
        return step.by_groups(device, lambda index, group: self._run_group(scan, step, index, group))

    def _run_in_place(self, scan: Scan, step: StateStep) -> torch.Tensor:
        """One row after another: states are computed where they are kept, from where they are kept."""
        outputs: list[torch.Tensor] = []
        for row in step.rows:
            span = slice(row.start, row.start + row.num_new_tokens)
            inputs, reads = (tuple(value[:, span] for value in values) for values in (scan.inputs, scan.reads))
            ring = [
                self._pool[row.slot, (row.num_computed_tokens + t) % self._size].unsqueeze(0) for t in range(self._size)
            ]
            state, lead = ring[0], max(0, row.num_new_tokens - (self._size - 1))
            if lead:
                some, rest = (tuple(value[:, :lead] for value in values) for values in (inputs, reads))
                output, state = scan.whole(some, rest, state)
                outputs.append(output)
                ring[lead % self._size].copy_(state)
                inputs, reads = (tuple(value[:, lead:] for value in values) for values in (inputs, reads))
            places = [ring[t % self._size] for t in range(lead + 1, row.num_new_tokens + 1)]
            outputs += [output.unsqueeze(1) for output, _ in scan.steps(inputs, reads, state, places)]
        return torch.cat([output.to(outputs[-1].dtype) for output in outputs], dim=1)

    def _run_group(self, scan: Scan, step: StateStep, index: int, group: ScanGroup) -> torch.Tensor:
        """Outputs [B, T, ...]."""
        inputs, reads = (tuple(group.take(value) for value in values) for values in (scan.inputs, scan.reads))
        flat = self._pool.flatten(0, 1)
        entries = step.memo(("entries", index, self._size, flat.device), lambda: self._entries(group, flat.device))
        state = flat.index_select(0, entries[0][1])
        outputs: list[torch.Tensor] = []
        lead = max(0, group.num_tokens - (self._size - 1))
        if lead:
            some, rest = (tuple(value[:, :lead] for value in values) for values in (inputs, reads))
            output, state = scan.whole(some, rest, state)
            outputs.append(output)
            flat.index_copy_(0, entries[lead][1], state.float())
            inputs, reads = (tuple(value[:, lead:] for value in values) for values in (inputs, reads))
        stepped = []
        for t, (output, after) in enumerate(scan.steps(inputs, reads, state), start=lead + 1):
            rows, places = entries[t]
            flat.index_copy_(0, places, after if rows is None else after.index_select(0, rows))
            stepped.append(output)
        outputs.append(torch.stack(stepped, dim=1))
        return outputs[0] if len(outputs) == 1 else torch.cat([value.to(outputs[-1].dtype) for value in outputs], dim=1)

    def _entries(self, group: ScanGroup, device: torch.device) -> dict[int, tuple[torch.Tensor | None, torch.Tensor]]:
        """For numbers of new tokens: the rows that have that many (None: all), and where their states are kept."""
        first_kept = max(1, group.num_tokens - (self._size - 1))
        entries: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        for t in (0, *range(first_kept, group.num_tokens + 1)):
            rows = [i for i, row in enumerate(group.rows) if row.num_new_tokens >= t]
            places = [
                group.rows[i].slot * self._size + (group.rows[i].num_computed_tokens + t) % self._size for i in rows
            ]
            selected = None if len(rows) == len(group.rows) else torch.tensor(rows, device=device)
            entries[t] = selected, torch.tensor(places, device=device)
        return entries
