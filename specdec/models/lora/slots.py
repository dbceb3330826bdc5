"""Room for several adapters beside a model's linear layers; in a step each token uses its own sequence's.

Which adapters lie on the device: those of the sequences that are first in order, and else those used last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.checkpoint.fingerprint import adapter_folder
from specdec.core.errors import ModelLoadError, reason_of
from specdec.core.types import Adapter
from specdec.models.lora.checkpoint import AdapterCheckpoint

_NOT_ADAPTED = frozenset({"experts", "kv_b_proj"})
"""Parts of the names of layers that do not read just the step's tokens: experts, and what expands cached latents."""
AdapterRun = tuple[int, int, int]
"""Tokens of a step that lie behind one another and use one adapter: its slot, the first token, the end."""
Weights = list[tuple[str, torch.Tensor, torch.Tensor]]
"""As a :class:`specdec.models.lora.checkpoint.AdapterCheckpoint` has them."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
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
        if isinstance(module, nn.Linear) and module is not head and _NOT_ADAPTED.isdisjoint(name.split("."))
    }


def layer_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """(output width, input width) of these layers, also of a model without weights."""
    layers: dict[str, Any] = adaptable_layers(model)
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


class AdapterSlots:
    """Adapters of a model that is in memory, each in a slot.

    Every linear layer adds to its result, whatever multiplies there: in a step the tokens of each adapter that is in it
    take a pair of products more, and the others nothing.

    Args:
        model: Its layers are made to call.
        room: Memory for so many is taken at once.

    Attributes:
        room: As given.
        shapes: See :func:`layer_shapes`.
        num_bytes: Of all slots.
    """

    def __init__(self, model: PreTrainedModel, room: LoRAConfig) -> None:
        self.room = room
        self.shapes = layer_shapes(model)
        self._step = _Step()
        self._layers = {
            name: _Layer(name, module, model.dtype, room, self._step)
            for name, module in adaptable_layers(model).items()
        }
        self.num_bytes = sum(layer.down.nbytes + layer.up.nbytes for layer in self._layers.values())

    def staged(self, weights: Weights) -> Weights:
        """The weights as slots hold them, and pinned where slots are on a GPU: so :meth:`put` only starts copies.

        Any thread may call this.
        """
        return [(name, self._layers[name].staged(down), self._layers[name].staged(up)) for name, down, up in weights]

    def put(self, slot: int, weights: Weights) -> None:
        """Copy an adapter to a slot, in place of the one that was there."""
        for layer in self._layers.values():
            layer.clear(slot)
        for name, down, up in weights:
            self._layers[name].put(slot, down, up)

    @contextmanager
    def used(self, runs: Sequence[AdapterRun], num_tokens: int, *, is_filled_up: bool = False) -> Iterator[None]:
        """Around a forward pass of ``num_tokens`` in which these use adapters; the others are the base model's.

        Args:
            runs: Which tokens use which.
            num_tokens: Of the pass.
            is_filled_up: Each run is multiplied by itself, filled up to as many tokens as the pass has.
        """
        assert self._step.is_other is None
        device = next(iter(self._layers.values())).down.device
        self._step.products = (
            [_product([run], device, num_tokens) for run in runs] if is_filled_up else _products(runs, device)
        )
        self._step.slots, self._step.num_tokens = frozenset(slot for slot, _, _ in runs), num_tokens
        try:
            yield
        finally:
            self._step.slots = frozenset()

    @contextmanager
    def used_by(self, slots: torch.Tensor) -> Iterator[None]:
        """Around a forward pass whose tokens only the device knows.

        Every layer multiplies every token with all slots, side by side as one matrix, and drops what is of others.

        Args:
            slots: int32 [tokens], of each token; -1 for none.
        """
        of_column = torch.arange(self.room.max_loras, dtype=torch.int32, device=slots.device)
        is_other = slots.unsqueeze(1) != of_column
        self._step.is_other = is_other.repeat_interleave(self.room.max_rank, dim=1)
        try:
            yield
        finally:
            self._step.is_other = None


@dataclass(frozen=True, slots=True)
class _Product:
    """Tokens of neighbouring slots, multiplied together.

    Attributes:
        filled_up: Numbers of the tokens of each slot, of all slots equally many; None where they are so as they lie.
        places: Of each token among those.
    """

    slots: slice
    tokens: slice
    filled_up: torch.Tensor | None
    places: torch.Tensor | None


@dataclass(slots=True)
class _Step:
    """What is to be done in the step that runs.

    Attributes:
        products: Of a step whose tokens the host knows.
        slots: Which it uses.
        num_tokens: Of that step.
        is_other: Of one whose tokens only the device knows: bool [tokens, slots x rank].
    """

    products: list[_Product] = field(default_factory=list)
    slots: frozenset[int] = frozenset()
    num_tokens: int = 0
    is_other: torch.Tensor | None = None


def _products(runs: Sequence[AdapterRun], device: torch.device) -> list[_Product]:
    """Runs of neighbouring slots that lie behind one another, as long as filling up no more than doubles the work."""
    groups: list[list[AdapterRun]] = []
    for run in runs:
        group = [*groups[-1], run] if groups else [run]
        most, total = (of(end - start for _, start, end in group) for of in (max, sum))
        follows = (group[-2][0] + 1, group[-2][2]) == run[:2] if len(group) > 1 else False
        if follows and len(group) * most <= 2 * total:
            groups[-1] = group
        else:
            groups.append([run])
    return [_product(group, device) for group in groups]


def _product(runs: list[AdapterRun], device: torch.device, least: int = 0) -> _Product:
    """One product of runs, each filled up to the longest, or to ``least`` tokens."""
    (first_slot, first, _), (last_slot, _, last) = runs[0], runs[-1]
    most = max(least, *(end - start for _, start, end in runs))
    slots, tokens = slice(first_slot, last_slot + 1), slice(first, last)
    if len(runs) * most == last - first:
        return _Product(slots, tokens, None, None)
    filled_up = [min(start + i, end - 1) - first for _, start, end in runs for i in range(most)]
    places = [most * number + i for number, (_, start, end) in enumerate(runs) for i in range(end - start)]
    return _Product(slots, tokens, torch.tensor(filled_up, device=device), torch.tensor(places, device=device))


class _Layer:
    """Adds to a linear layer's results what the step's adapters make of its inputs."""

    def __init__(self, name: str, module: Any, dtype: torch.dtype, room: LoRAConfig, step: _Step) -> None:
        self._name, self._step = name, step
        self._filled: set[int] = set()
        device = module.weight.device
        module.register_forward_hook(lambda _, inputs, output: self._add(inputs[0], output))
        if device.type == "cpu":
            dtype = torch.float32  # a call of its bfloat16 products costs several times what so small a product does
        make = partial(torch.zeros, room.max_loras, room.max_rank, dtype=dtype, device=device)
        self.down, self.up = make(module.in_features), make(module.out_features)

    def clear(self, slot: int) -> None:
        self._filled.discard(slot)
        for weights in (self.down, self.up):
            weights[slot].zero_()

    def staged(self, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.to(self.down.dtype).contiguous()
        if not weight.isfinite().all():  # it is multiplied by zeros for other sequences' tokens
            raise ModelLoadError(f"an adapter's weights for {self._name} are too large for {self.down.dtype}")
        return weight.pin_memory() if self.down.is_cuda else weight

    def put(self, slot: int, down: torch.Tensor, up: torch.Tensor) -> None:
        self.down[slot, : len(down)].copy_(down, non_blocking=True)
        self.up[slot, : len(up)].copy_(up, non_blocking=True)
        self._filled.add(slot)

    def _add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        step = self._step
        if step.is_other is not None:
            self._add_by_token(inputs, outputs, step.is_other)
            return
        if step.slots.isdisjoint(self._filled):
            return
        inputs, outputs = inputs.reshape(-1, inputs.shape[-1]), outputs.view(-1, outputs.shape[-1])
        if len(inputs) != step.num_tokens:
            raise ValueError(f"adapters cannot change {self._name}: it reads other inputs than the step's tokens")
        for product in step.products:
            down = self.down[product.slots].transpose(1, 2)
            rows = _selected(inputs[product.tokens], product.filled_up).to(down.dtype)
            narrow = torch.bmm(rows.view(len(down), -1, rows.shape[-1]), down)
            added = torch.bmm(narrow, self.up[product.slots]).view(-1, outputs.shape[-1])
            outputs[product.tokens] += _selected(added, product.places)

    def _add_by_token(self, inputs: torch.Tensor, outputs: torch.Tensor, is_other: torch.Tensor) -> None:
        inputs, outputs = inputs.reshape(-1, inputs.shape[-1]), outputs.view(-1, outputs.shape[-1])
        if len(inputs) != len(is_other):
            raise ValueError(f"adapters cannot change {self._name}: it reads other inputs than the step's tokens")
        down, up = self.down.flatten(0, 1), self.up.flatten(0, 1)
        narrow = (inputs.to(down.dtype) @ down.t()).masked_fill(is_other.to(down.device), 0.0)
        outputs += narrow @ up


def _selected(rows: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
    return rows if numbers is None else rows.index_select(0, numbers.to(rows.device))


_IDLE_S = 5.0
"""A thread that reads adapters ends after so long without one."""
_SLOW_READ_S = 2.0
"""A file that takes longer to read leaves its slot to others, until it is there."""
_READINGS_PER_SLOT = 4
"""So many files are read at once, for each slot, at the most."""
_NONE_SERVED = "this worker serves no adapters"


class _Reading(NamedTuple):
    """A file that is being read, or was, and when that began on the monotonic clock."""

    weights: Future[Weights]
    since_s: float

    @property
    def is_slow(self) -> bool:
        return not self.weights.done() and time.monotonic() - self.since_s > _SLOW_READ_S


class AdapterPool:
    """Adapters by what is in them, loaded when a sequence needs them. Used by one thread; each file is read by its own.

    Where there are more than slots, those of the sequences that are first in order have them, as long as these last;
    sequences with others wait. Of what nobody needs, the least recently used one goes first. A file that hangs holds a
    thread, and no slot.

    Args:
        slots: Of the model; None where it serves no adapters: then all fail.
    """

    def __init__(self, slots: AdapterSlots | None) -> None:
        self._slots = slots
        self._max_loras = 0 if slots is None else slots.room.max_loras
        self._holders: dict[str, tuple[tuple[int, float], str, Adapter]] = {}
        self._first: list[Adapter] = []
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        self._reading: dict[str, _Reading] = {}
        self._failures: dict[str, str] = {}
        self._to_read: SimpleQueue[tuple[Adapter, Future[Weights]]] = SimpleQueue()
        self._idle = Semaphore(0)
        self.num_loads = 0

    def hold(self, key: str, adapter: Adapter | None, order: tuple[int, float]) -> None:
        """A sequence needs its adapter, if it has one, until it is released."""
        if adapter is not None and key not in self._holders:
            self._holders[key] = order, key, adapter
            self._choose()

    def release(self, key: str) -> None:
        """A sequence needs its adapter no more; unknown keys are ignored."""
        if self._holders.pop(key, None) is not None:
            self._choose()

    def _choose(self) -> None:
        adapters: dict[str, Adapter] = {}
        for _, _, adapter in sorted(self._holders.values()):
            adapters.setdefault(adapter.fingerprint, adapter)
        slow = {name for name, reading in self._reading.items() if reading.is_slow}
        self._first = [one for name, one in adapters.items() if name not in slow][: self._max_loras]
        self._failures = {name: reason for name, reason in self._failures.items() if name in adapters}

    def prepare(self) -> None:
        """Before a step: begin to read what is needed, and copy to the device what has been read."""
        if self._reading:
            self._choose()
        needed = {adapter.fingerprint for adapter in self._first}
        for name in [name for name, reading in self._reading.items() if name not in needed and reading.weights.done()]:
            del self._reading[name]  # until then it is kept, so that a file that hangs holds one thread at most
        for adapter in self._first:
            name = adapter.fingerprint
            if name in self._slot_of:
                self._slot_of.move_to_end(name)
            elif name not in self._failures and name not in self._reading:
                if len(self._reading) >= _READINGS_PER_SLOT * self._max_loras:
                    continue  # files that hang hold a thread each
                self._reading[name] = _Reading(self._start_reading(adapter), time.monotonic())
            elif name in self._reading and self._reading[name].weights.done():
                self._take(name, self._reading.pop(name).weights, needed)

    def slot(self, adapter: Adapter | None) -> int | None:
        """Where an adapter lies; None where it does not, or there is none."""
        return None if adapter is None else self._slot_of.get(adapter.fingerprint)

    def failure(self, adapter: Adapter | None) -> str:
        """Why an adapter cannot be had; empty where it can, or where nobody knows yet."""
        if adapter is None:
            return ""
        return _NONE_SERVED if self._slots is None else self._failures.get(adapter.fingerprint, "")

    def must_wait(self, adapter: Adapter | None) -> bool:
        """Whether a sequence cannot take part in a step, as its adapter is not on the device."""
        return adapter is not None and adapter.fingerprint not in self._slot_of

    def metrics(self) -> dict[str, float]:
        """What is held now, and how many were loaded since the start."""
        return {"num_loaded_adapters": float(len(self._slot_of)), "num_adapter_loads": float(self.num_loads)}

    def _start_reading(self, adapter: Adapter) -> Future[Weights]:
        """Read beside the step. A file that comes slowly, or never, holds up no other, nor the process's end."""
        reading: Future[Weights] = Future()
        self._to_read.put((adapter, reading))
        if not self._idle.acquire(blocking=False):
            Thread(target=self._read_all, name="adapters", daemon=True).start()
        return reading

    def _read_all(self) -> None:
        """Read what is asked for. A thread is used again: memory that a thread has freed stays with its allocator."""
        while True:
            try:
                adapter, reading = self._to_read.get(timeout=_IDLE_S)
            except Empty:
                if self._idle.acquire(blocking=False):
                    return
                continue  # something was just asked for
            try:
                reading.set_result(self._read(adapter))
            except BaseException as error:
                reading.set_exception(error)
            del reading
            self._idle.release()

    def _read(self, adapter: Adapter) -> Weights:
        assert self._slots is not None, "nothing is read where nothing is served"
        checkpoint = AdapterCheckpoint(adapter_folder(adapter.path), self._slots.shapes, self._slots.room.max_rank)
        if checkpoint.fingerprint != adapter.fingerprint:
            raise ModelLoadError(f"the adapter {adapter.name} at {adapter.path} is another than when it was loaded")
        return self._slots.staged(checkpoint.weights)

    def _take(self, name: str, reading: Future[Weights], needed: set[str]) -> None:
        assert self._slots is not None, "nothing is read where nothing is served"
        try:
            weights = reading.result()
        except Exception as error:  # whatever a file makes of its reader: it is the adapter's own
            self._failures[name] = str(error) if isinstance(error, ModelLoadError) else reason_of(error)
            return
        free = set(range(self._max_loras)) - set(self._slot_of.values())
        slot = min(free) if free else self._slot_of.pop(next(one for one in self._slot_of if one not in needed))
        self._slots.put(slot, weights)
        self._slot_of[name] = slot
        self.num_loads += 1
