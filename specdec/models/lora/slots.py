"""Room for several adapters beside a model's linear layers; in a step each token uses its own sequence's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.models.packed import PackedLinear

_NOT_ADAPTED = frozenset({"experts", "kv_b_proj"})
"""Parts of the names of layers that do not read just the step's tokens: experts, and what expands cached latents."""
Run = tuple[int, int, int]
"""Tokens of a step that lie behind one another and use one adapter: its slot, the first token, the end."""
Weights = list[tuple[str, torch.Tensor, torch.Tensor]]
"""As :meth:`specdec.models.lora.checkpoint.AdapterCheckpoint.weights` gives them."""


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """How many adapters a device holds.

    Attributes:
        max_loras: Adapters at once.
        max_rank: The largest rank of one.
    """

    max_loras: int = 4
    max_rank: int = 16


def adaptable_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers that adapters may change, by name; the head is not among them."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, PackedLinear))
        and module is not head
        and _NOT_ADAPTED.isdisjoint(name.split("."))
    }


def layer_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """(output width, input width) of these layers, also of a model without weights."""
    layers: dict[str, Any] = adaptable_layers(model)
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


class AdapterSlots:
    """Adapters of a model that is in memory, each in a slot.

    Every linear layer gets a forward hook, whatever multiplies there: in a step the tokens of each adapter that is in
    it take a pair of products more, and the others nothing.

    Args:
        model: Hooks are put on its layers.
        room: Memory for so many is taken at once.

    Attributes:
        room: As given.
        shapes: See :func:`layer_shapes`.
        num_bytes: Of all slots.
    """

    def __init__(self, model: PreTrainedModel, room: AdapterRoom) -> None:
        self.room = room
        self.shapes = layer_shapes(model)
        self._step = _Step()
        self._layers: dict[str, _Layer] = {}
        for name, module in adaptable_layers(model).items():
            layer = self._layers[name] = _Layer(name, module, model.dtype, room, self._step)
            module.register_forward_hook(layer)
        self.num_bytes = sum(layer.down.nbytes + layer.up.nbytes for layer in self._layers.values())

    def put(self, slot: int, weights: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Copy an adapter to a slot, in place of the one that was there."""
        for layer in self._layers.values():
            layer.clear(slot)
        for name, down, up in weights:
            self._layers[name].put(slot, down, up)

    @contextmanager
    def used(self, runs: Sequence[Run], num_tokens: int) -> Iterator[None]:
        """Around a forward pass of ``num_tokens`` in which these use adapters; the others are the base model's."""
        self._step.runs, self._step.num_tokens = runs, num_tokens
        shapes = {(slot - place, end - start) for place, (slot, start, end) in enumerate(runs)}
        self._step.is_even = len(shapes) == 1 and sum(end - start for _, start, end in runs) == runs[-1][2] - runs[0][1]
        try:
            yield
        finally:
            self._step.runs = ()


@dataclass(slots=True)
class _Step:
    """What is to be done; even: runs of one length lie behind one another, and so do their slots."""

    runs: Sequence[Run] = field(default=())
    num_tokens: int = 0
    is_even: bool = False


class _Layer:
    """A linear layer's hook: adds what the step's adapters make of its inputs."""

    def __init__(self, name: str, module: Any, dtype: torch.dtype, room: AdapterRoom, step: _Step) -> None:
        device = torch.device("cpu") if isinstance(module, PackedLinear) else module.weight.device
        if device.type == "cpu":
            dtype = torch.float32  # a call of its bfloat16 products costs several times what so small a product does
        self._name, self._step = name, step
        self.down = torch.zeros(room.max_loras, room.max_rank, module.in_features, dtype=dtype, device=device)
        self.up = torch.zeros(room.max_loras, room.max_rank, module.out_features, dtype=dtype, device=device)
        self.weights: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * room.max_loras

    def clear(self, slot: int) -> None:
        self.weights[slot] = None
        self.down[slot].zero_()
        self.up[slot].zero_()

    def put(self, slot: int, down: torch.Tensor, up: torch.Tensor) -> None:
        views = self.down[slot, : len(down)], self.up[slot, : len(up)]
        views[0].copy_(down)
        views[1].copy_(up)
        self.weights[slot] = views[0].T, views[1]

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        runs = self._step.runs
        if not runs or not any(self.weights[slot] is not None for slot, _, _ in runs):
            return
        first, end_of_all = runs[0][1], runs[-1][2]
        inputs = args[0].reshape(-1, args[0].shape[-1])
        if len(inputs) != self._step.num_tokens:
            raise ValueError(f"adapters cannot change {self._name}: it reads other inputs than the step's tokens")
        inputs = inputs[first:end_of_all].to(self.down.dtype)
        if self._step.is_even:
            slots = slice(runs[0][0], runs[-1][0] + 1)
            narrow = torch.bmm(inputs.view(len(runs), -1, inputs.shape[-1]), self.down[slots].transpose(1, 2))
            added = torch.bmm(narrow, self.up[slots]).view(len(inputs), -1)
        else:
            # One addition for all: there are no rows without an adapter between those with one, as a rule.
            added = inputs.new_zeros(len(inputs), output.shape[-1])
            for slot, start, end in runs:
                weights = self.weights[slot]
                if weights is not None:
                    rows = slice(start - first, end - first)
                    torch.mm(inputs[rows] @ weights[0], weights[1], out=added[rows])
        output.view(-1, output.shape[-1])[first:end_of_all] += added
