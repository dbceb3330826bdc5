"""The recurrent states of many sequences on one model: pooled, and brought back to earlier lengths.

Copies of recurrent states at block borders, so that prompts that begin alike are read once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.cache.recurrent.binding import RecurrentLayer, ScanShape
from specdec.cache.recurrent.rescan import Rescan
from specdec.cache.recurrent.slots import SequenceState, StateSlots, Window
from specdec.core.errors import InvalidParameterError
from specdec.kernels.conv import Convolution, ConvWindows
from specdec.kernels.recurrent import KeptStates, RecurrentKernels, StateTensors
from specdec.kernels.recurrent_metadata import StateRow, StateStep
from specdec.kernels.scan import Scan

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


MIN_WINDOW_TOKENS = 4
"""What the admission check takes back."""


class ScanStates(Protocol):
    """What is kept of one scan for every slot."""

    @property
    def kept(self) -> KeptStates:
        """All of it, for kernels."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        ...

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots those of empty sequences."""
        ...

    def copy(self, source: int, destination: int) -> None:
        """Make a slot like another."""
        ...

    def run(self, scan: Scan, step: StateStep) -> torch.Tensor:
        """Scan every row from its own state, and keep what comes of it: outputs [1, N, ...]."""
        ...


def scan_states(shape: ScanShape, num_slots: int, window: Window) -> ScanStates:
    """What is kept of a scan."""
    return Rescan(shape.state_shape, shape.input_shapes, num_slots, window.num_tokens, shape.device)


class StatePool:
    """State slots, and the tensors of all recurrent layers behind them. Used by one thread at a time.

    Up to half of the slots hold copies for prompts that begin alike, while no sequence wants them.

    Args:
        layers: The model's recurrent layers.
        num_slots: Most sequences and branches at once.
        window: How far back they can go.
        make_states: What keeps the states of a scan.
        kernels: What moves states in steps whose rows only the device knows.
        make_scan: What each scan is led through, such as :class:`specdec.kernels.scan.TokenByToken`.
    """

    def __init__(
        self,
        layers: Sequence[RecurrentLayer],
        num_slots: int,
        window: Window,
        make_states: Callable[[ScanShape, int, Window], ScanStates] = scan_states,
        kernels: RecurrentKernels | None = None,
        make_scan: Callable[[Scan], Scan] = lambda scan: scan,
    ) -> None:
        self.kernels = kernels
        self._make_scan = make_scan
        self.window = window
        self.slots = StateSlots(num_slots)
        self.prefixes = PrefixStates(num_slots // 2)
        self._uncleared: set[int] = set()
        self._step: StateStep | StateTensors | None = None
        self._ahead: Sequence[StateRow] = ()
        self._next_scan: dict[int, int] = {}
        num_kept = window.num_kept_tokens
        self._convolutions = {
            layer.index: ConvWindows(layer.convolution, num_slots, num_kept)
            for layer in layers
            if layer.convolution is not None
        }
        self._scans = {
            layer.index: [make_states(shape, num_slots, window) for shape in layer.scans] for layer in layers
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots in all layers."""
        return sum(states.num_bytes for states in self._states())

    @property
    def num_free(self) -> int:
        """Slots nobody holds, those kept only for prefix reuse included."""
        return self.slots.num_free + len(self.prefixes)

    @property
    def num_in_use(self) -> int:
        """Slots some sequence or branch holds."""
        return self.slots.num_in_use - len(self.prefixes)

    @property
    def num_reusable(self) -> int:
        """Slots kept only for prefix reuse."""
        return len(self.prefixes)

    def take(self) -> SequenceState | None:
        """The state of an empty sequence; None where no slot is free."""
        state = self._take_slot()
        if state is not None:
            self._uncleared.add(state.slot)
        return state

    def copy(self, state: SequenceState) -> SequenceState | None:
        """A state of its own that can be brought back like ``state``; None where no slot is free."""
        copy = self._take_slot()
        if copy is not None:
            self._copy(state, copy)
            copy.kept = state.kept
        return copy

    def keep_prefix(self, state: SequenceState, digests: Sequence[bytes], block_size: int) -> None:
        """Copy a state for others that begin like its sequence, if that is worth a slot, and one is left for it.

        Args:
            state: Of a sequence that is at least as long as its digests say.
            digests: Chained digests of its full, verified blocks.
            block_size: Positions per block.
        """
        if not self.prefixes.is_wanted(state, digests, block_size):
            return
        if len(self.prefixes) >= self.prefixes.most:
            self._drop_prefix()
        copy = self.slots.take()
        if copy is not None:
            self._copy(state, copy)
            self.prefixes.add(copy, digests, block_size)
            state.kept = len(digests) * block_size

    def reuse_prefix(self, digest: bytes, length: int) -> SequenceState | None:
        """A state after the ``length`` tokens that end with the block of a digest; None where there is none."""
        if digest not in self.prefixes:
            return None
        found = self.prefixes.find(digest)
        is_last = not self.slots.num_free and len(self.prefixes) == 1
        state = self.prefixes.pop() if is_last else self.copy(found)
        if state is not None:
            state.kept = length
        return state

    def give_back(self, state: SequenceState) -> None:
        """Free a state's slot."""
        self.slots.give_back(state)

    def clear_taken(self) -> None:
        """Clear the slots that were taken since the last step; before the next one."""
        if self._uncleared:
            slots = sorted(self._uncleared)
            for states in self._states():
                states.clear(slots)
            self._uncleared.clear()

    def begin(self, step: StateStep | StateTensors, ahead: Sequence[StateRow] = ()) -> None:
        """The step whose convolutions and scans come next.

        Args:
            step: Its rows.
            ahead: Rows of tensors that begin behind tokens of theirs, which the stock scan reads before.
        """
        self._step, self._ahead = step, ahead
        self._next_scan = dict.fromkeys(self._scans, 0)

    def extended(self, inputs: torch.Tensor, index: int, state_idx: int, kernel_size: int | None) -> torch.Tensor:
        """A convolution's inputs [1, C, N], each row's with those before it: [1, C, M]."""
        assert self._step is not None, "begin() comes first"
        if isinstance(self._step, StateTensors):
            return inputs  # the kernel finds those before them
        return self._convolutions[index].extend(inputs, self._step)

    def convolved(self, index: int, convolution: Convolution) -> torch.Tensor:
        """What a convolution gives for the step's tokens: [1, C, N]."""
        assert self._step is not None, "begin() comes first"
        windows = self._convolutions[index]
        if isinstance(self._step, StateTensors):
            assert self.kernels is not None
            weight, bias, activation = convolution.weight, convolution.bias, convolution.activation
            return self.kernels.convolve(convolution.inputs, windows.ring, weight, bias, activation, self._step)
        return windows.outputs(convolution.run(), self._step)

    def scanned(self, index: int, scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
        """Scan every row from its own state, and keep what it takes to roll it back."""
        assert self._step is not None, "begin() comes first"
        states = self._scans[index][self._next_scan[index]]
        self._next_scan[index] += 1
        if isinstance(self._step, StateTensors):
            assert self.kernels is not None
            read = [(row, _read_ahead(scan, states.kept, row)) for row in self._ahead]
            outputs = self.kernels.scan(scan, states.kept, self._step)
            for row, of_row in read:
                outputs[:, row.start : row.start + row.num_ahead] = of_row
            return scan.result(outputs)
        return scan.result(states.run(self._make_scan(scan), self._step))

    def _take_slot(self) -> SequenceState | None:
        """A free slot, if need be that of the prefix which nobody has used for longest."""
        if not self.slots.num_free:
            self._drop_prefix()
        return self.slots.take()

    def _drop_prefix(self) -> None:
        dropped = self.prefixes.pop()
        if dropped is not None:
            self.slots.give_back(dropped)

    def _copy(self, state: SequenceState, copy: SequenceState) -> None:
        copy.oldest, copy.newest = state.oldest, state.newest
        if state.slot in self._uncleared:  # of an empty sequence that no step has read yet
            self._uncleared.add(copy.slot)
            return
        self._uncleared.discard(copy.slot)
        for states in self._states():
            states.copy(state.slot, copy.slot)

    def _states(self) -> list[ConvWindows | ScanStates]:
        return [*self._convolutions.values(), *(states for scans in self._scans.values() for states in scans)]


def _read_ahead(scan: Scan, kept: KeptStates, row: StateRow) -> torch.Tensor:
    """Scan a row's first tokens by what is meant for many: [1, T, ...]. Indices are numbers: nothing is uploaded."""
    part, slot = slice(row.start, row.start + row.num_ahead), slice(row.slot, row.slot + 1)
    inputs, reads = (tuple(value[:, part] for value in values) for values in (scan.inputs, scan.reads))
    outputs, state = scan.whole(inputs, reads, kept.last[slot])
    kept.last[slot].copy_(state)  # the kernel, which begins here, keeps it as the window's first
    return outputs


def checked_window(num_tokens: int) -> Window:
    """A window of ``num_tokens``.

    Raises:
        InvalidParameterError: it is too short.
    """
    if num_tokens < MIN_WINDOW_TOKENS:
        message = f"rollback_tokens must be at least {MIN_WINDOW_TOKENS}, got {num_tokens}"
        raise InvalidParameterError("rollback_tokens", message)
    return Window(num_tokens)


def state_bytes(layers: Sequence[RecurrentLayer]) -> int:
    """Bytes of one sequence's states and convolution windows at one position."""
    return sum(
        sum(_numbers(scan.state_shape) * 4 for scan in layer.scans)
        + (layer.convolution.bytes_per_slot(0) if layer.convolution is not None else 0)
        for layer in layers
    )


def bytes_per_slot(layers: Sequence[RecurrentLayer], window: Window) -> int:
    """Bytes of one slot in all layers: what a sequence's state and its way back take."""
    total = 0
    for layer in layers:
        if layer.convolution is not None:
            total += layer.convolution.bytes_per_slot(window.num_kept_tokens)
        for scan in layer.scans:
            per_token = sum(_numbers(shape) * dtype.itemsize for shape, dtype in scan.input_shapes)
            total += 2 * _numbers(scan.state_shape) * 4 + window.num_kept_tokens * per_token
    return total


def _numbers(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
