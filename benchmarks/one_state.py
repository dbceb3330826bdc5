"""A recurrent state that cannot be rolled back, only copied: what other ways to roll back are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.cache.recurrent.binding import ScanShape
from specdec.cache.recurrent.slots import Window
from specdec.kernels.recurrent import KeptStates
from specdec.kernels.recurrent_metadata import ScanGroup, StateStep
from specdec.kernels.scan import Scan


class OneState:
    """One state of one scan per slot, after all that its sequence has read.

    Args:
        shape: Of the scan.
        num_slots: Slots.
        window: Ignored.

    Attributes:
        kept: For kernels, which are not run over it.
    """

    def __init__(self, shape: ScanShape, num_slots: int, window: Window) -> None:
        self._pool = torch.zeros(num_slots, *shape.state_shape, device=shape.device)
        self.kept = KeptStates(self._pool, self._pool, ())

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self._pool.nbytes

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots those of empty sequences."""
        self._pool[slots] = 0

    def copy(self, source: int, destination: int) -> None:
        """Make a slot like another."""
        self._pool[destination] = self._pool[source]

    def run(self, scan: Scan, step: StateStep) -> torch.Tensor:
        """Scan rows side by side, those longer than the window alone: outputs [1, N, ...]."""
        return step.by_groups(scan.inputs[0].device, lambda index, group: self._run_group(scan, step, index, group))

    def _run_group(self, scan: Scan, step: StateStep, index: int, group: ScanGroup) -> torch.Tensor:
        device = self._pool.device
        slots = step.memo(("slots", index, device), lambda: torch.tensor([r.slot for r in group.rows], device=device))
        inputs, reads = (tuple(group.take(value) for value in values) for values in (scan.inputs, scan.reads))
        if group.is_padded:
            inputs = scan.neutral(inputs, group.is_padding)
        run = scan.few if group.num_tokens <= step.window.num_tokens else scan.whole
        outputs, state = run(inputs, reads, self._pool.index_select(0, slots))
        self._pool.index_copy_(0, slots, state.float())
        return outputs
