"""Recurrent layers of a step whose rows only the device knows: what kernels are told, and where they keep states."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from specdec.kernels.scan import Scan

_KERNELS = {"triton": "specdec.kernels.triton.recurrent"}


@dataclass(frozen=True, slots=True)
class StateTensors:
    """The rows and tokens of a step on the device; all int32.

    Each scan has two states per slot, those after ``oldest`` and after ``newest`` tokens, and the inputs since the
    first. A row goes on from the second. Where it was cut back it scans the inputs from the first one on once more.

    Attributes:
        slot: [R], where each row's state is.
        start: [R], its first token in the step.
        count: [R], how many; 0 for rows that are not there.
        length: [R], tokens that its state has seen and that count.
        oldest: [R], where its window begins before the step.
        newest: [R], tokens after which its state was computed last.
        oldest_after: [R], where its window begins after the step.
        token_slot: [T], the slot of each token's row; -1 for padding.
        token_index: [T], its number within the row.
        token_position: [T], its number within the sequence.
        token_left: [T], how many tokens of the row are left, itself among them.
    """

    slot: Tensor
    start: Tensor
    count: Tensor
    length: Tensor
    oldest: Tensor
    newest: Tensor
    oldest_after: Tensor
    token_slot: Tensor
    token_index: Tensor
    token_position: Tensor
    token_left: Tensor

    def read_ahead(self) -> StateTensors:
        """As rows are behind tokens that were read before: of those whose window begins behind where they do."""
        ahead = torch.minimum((self.oldest - self.length).clamp(min=0), self.count)
        return replace(self, start=self.start + ahead, count=self.count - ahead, length=self.length + ahead)


@dataclass(frozen=True, slots=True)
class KeptStates:
    """What is kept of one scan for every slot.

    Attributes:
        first: float32 [slots, ...], states at the windows' beginnings.
        last: The same at the sequences' ends.
        inputs: [slots, ring size, ...] each: position p of a sequence at entry p mod ring size.
    """

    first: Tensor
    last: Tensor
    inputs: Sequence[Tensor]


class RecurrentKernels(Protocol):
    """The kernels; all launch without waiting, and read a step's rows from the device."""

    def convolve(
        self,
        inputs: Tensor,
        ring: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        at: StateTensors,
    ) -> Tensor:
        """A causal convolution of each channel by itself, whose last inputs are kept.

        Args:
            inputs: [1, C, T].
            ring: [slots, ring size, C]: the inputs of position p at entry p mod ring size.
            weight: [C, k], with k - 1 smaller than the ring.
            bias: [C].
            activation: ``silu``, ``swish`` or None.
            at: The step.

        Returns:
            [1, C, T], of the inputs' type; 0 for padding.
        """
        ...

    def scan(self, scan: Scan, kept: KeptStates, at: StateTensors) -> Tensor:
        """Scan each row's tokens from its own state; states and inputs are kept.

        Args:
            scan: Of all T tokens, [1, T, ...].
            kept: Of this scan.
            at: The step.

        Returns:
            Outputs as ``scan`` would give them, [1, T, ...]; 0 for padding.
        """
        ...


def recurrent_kernels(name: str) -> RecurrentKernels | None:
    """The kernels that go with an attention kernel, by its name; None where there are none."""
    module = _KERNELS.get(name)
    return None if module is None else cast(RecurrentKernels, importlib.import_module(module))
