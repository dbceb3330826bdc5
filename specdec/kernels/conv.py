"""Short causal convolutions: the last inputs of every sequence, put before its new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.kernels.recurrent_metadata import StateStep


@dataclass(frozen=True, slots=True)
class ConvShape:
    """A layer's convolution.

    Attributes:
        num_channels: C.
        kernel_size: Inputs that an output depends on, its own among them.
        dtype: Of its inputs.
        device: Of its inputs.
    """

    num_channels: int
    kernel_size: int
    dtype: torch.dtype
    device: torch.device

    def num_kept(self, num_kept_tokens: int) -> int:
        """Inputs kept per slot, so that any of the last ``num_kept_tokens`` tokens can be taken back."""
        return num_kept_tokens + self.kernel_size - 1

    def bytes_per_slot(self, num_kept_tokens: int) -> int:
        """Bytes kept per sequence."""
        return self.num_kept(num_kept_tokens) * self.num_channels * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Convolution:
    """One call of a layer's convolution.

    Attributes:
        stock: The modelling module's function.
        inputs: [1, C, M].
        weight: [C, kernel size].
        bias: [C].
        activation: By its name.
        options: What else the function is called with.
    """

    stock: Callable[..., torch.Tensor]
    inputs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    options: Mapping[str, Any]

    def run(self) -> torch.Tensor:
        """By that function: [1, C, M]."""
        return self.stock(self.inputs, self.weight, self.bias, activation=self.activation, **self.options)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Indices of a step for one kernel size, int64.

    Attributes:
        past: [B * (k - 1)], kept inputs before each row, in the flattened ring.
        order: [M], how past inputs, then new ones, are laid out: each row's past before its new ones.
        outputs: [N], where each token's output is in that layout.
        sources: Tokens whose inputs are kept.
        kept: Where they are kept, in the flattened ring.
    """

    past: torch.Tensor
    order: torch.Tensor
    outputs: torch.Tensor
    sources: torch.Tensor
    kept: torch.Tensor


class ConvWindows:
    """The last inputs of a layer's convolution for every slot: position p of a sequence at entry p mod ring size.

    Before its beginning a sequence has inputs of zero. Its first entries are those of its slot, zeroed when it was
    taken, and no token that can be taken back reaches so far that they were overwritten.

    Args:
        shape: Of the convolution.
        num_slots: Slots.
        num_kept_tokens: How many tokens can be taken back.

    Attributes:
        ring: [slots, ring size, C].
    """

    def __init__(self, shape: ConvShape, num_slots: int, num_kept_tokens: int) -> None:
        self._shape = shape
        self._size = shape.num_kept(num_kept_tokens)
        self.ring = torch.zeros(num_slots, self._size, shape.num_channels, dtype=shape.dtype, device=shape.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.ring.nbytes

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots those of empty sequences."""
        for slot in slots:
            self.ring[slot].zero_()  # a list as an index would be uploaded

    def copy(self, source: int, destination: int) -> None:
        """Make a slot like another."""
        self.ring[destination] = self.ring[source]

    def extend(self, inputs: torch.Tensor, step: StateStep) -> torch.Tensor:
        """Put before each row's inputs those that it begins with, and keep its last.

        Args:
            inputs: [1, C, N].
            step: The rows.

        Returns:
            [1, C, M] with M = N + rows * (kernel size - 1).
        """
        layout = self._layout(step)
        ring = self.ring.flatten(0, 1)
        new = inputs[0].transpose(0, 1).to(ring.dtype)
        laid_out = torch.cat([ring.index_select(0, layout.past), new]).index_select(0, layout.order)
        ring.index_copy_(0, layout.kept, new.index_select(0, layout.sources))
        return laid_out.transpose(0, 1).unsqueeze(0).to(inputs.dtype)

    def outputs(self, outputs: torch.Tensor, step: StateStep) -> torch.Tensor:
        """Of what a causal convolution makes of that layout, [1, C, M], the tokens' own: [1, C, N]."""
        return outputs.index_select(2, self._layout(step).outputs)

    def _layout(self, step: StateStep) -> _Layout:
        kind = ("conv", self._shape.kernel_size, self._size, self.ring.device)
        return step.memo(kind, lambda: self._lay_out(step))

    def _lay_out(self, step: StateStep) -> _Layout:
        size, num_past = self._size, self._shape.kernel_size - 1
        past: list[int] = []
        order: list[int] = []
        outputs: list[int] = []
        sources: list[int] = []
        kept: list[int] = []
        num_all_past = num_past * len(step.rows)
        for row in step.rows:
            base, length = row.slot * size, row.num_computed_tokens
            order += range(len(past), len(past) + num_past)
            past += [base + position % size for position in range(length - num_past, length)]
            outputs += range(len(order), len(order) + row.num_new_tokens)
            order += range(num_all_past + row.start, num_all_past + row.start + row.num_new_tokens)
            for offset in range(max(0, row.num_new_tokens - size), row.num_new_tokens):
                sources.append(row.start + offset)
                kept.append(base + (length + offset) % size)
        return _Layout(*(torch.tensor(x, device=self.ring.device) for x in (past, order, outputs, sources, kept)))
