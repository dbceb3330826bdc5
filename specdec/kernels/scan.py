"""What a recurrence must be able to do so that its state can be kept, split and rolled back per sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]
Stock = Callable[..., Any]
"""A scan function of a modelling module: a kernel's, where one is installed, or transformers' own."""


class Scan(ABC):
    """One call of a layer's scan, over tokens of many sequences behind one another.

    The same object then runs it over any rows cut out of them: ``inputs`` and ``reads`` stand for [B, T, ...] tensors
    with as many entries and the same trailing dimensions as the attributes, states for float32 [B, *state_shape].

    Attributes:
        inputs: What moves the state: [1, N, ...] each.
        reads: What else the outputs depend on: [1, N, ...] each.
    """

    inputs: Tensors
    reads: Tensors

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one sequence's state."""

    @abstractmethod
    def whole(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [B, T, ...] and the state after the last token; meant for many tokens."""

    @abstractmethod
    def few(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`whole`, meant for a window's tokens: at least one."""

    @abstractmethod
    def neutral(self, inputs: Tensors, is_padding: torch.Tensor) -> Tensors:
        """``inputs`` that leave the state exactly as it is where ``is_padding``, bool [B, T]."""

    @abstractmethod
    def result(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the stock function returns for all N tokens, from outputs [1, N, ...].

        The second is what the layer hands to the cache as its state, which has it already: a placeholder.
        """


def spread(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask [B, T] as [B, T, 1, ...], for a tensor with more dimensions."""
    return mask.view(*mask.shape, *([1] * (like.ndim - 2)))


def without(values: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """``values`` [B, T, ...] with zeros where ``is_padding``."""
    return values.masked_fill(spread(is_padding, values), 0)
