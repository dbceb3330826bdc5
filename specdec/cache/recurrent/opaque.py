"""States that are known only as what a model returns, or leaves on its own modules.

They are rolled back by snapshot and replay: a sequence has whatever its model returns as its state, and copies of it
at one or two earlier lengths. The nearest copy before is taken, and the tokens since then are read once more, one by
one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from specdec.cache.recurrent.slots import SequenceState, StateSlots, Window
from specdec.core.errors import ModelLoadError
from specdec.core.tokens import TokenSequence, as_list

NUM_COPIES = 3
"""Of a state: the newest, and two earlier ones to go back to."""
_NAMES = ("state", "cache_params", "past_key_values")
_NUM_TOKENS = (1, 33)


ModuleAttribute = tuple[str, str]
"""A module's name, and the attribute in which it keeps a part of its state."""


@dataclass(frozen=True, slots=True)
class OpaqueState:
    """A model's state as an object of its own.

    Attributes:
        argument: Under which name the model takes it, and returns it.
        bytes_per_sequence: Bytes of its tensors that do not grow.
        bytes_per_token: Bytes by which they grow with a token.
        places: Where the model keeps a part of it between calls. It is there only while the model runs; such a model
            does not return the rest, but changes what it was given.
    """

    argument: str
    bytes_per_sequence: int
    bytes_per_token: int
    places: tuple[ModuleAttribute, ...] = ()


@dataclass(slots=True)
class _OnModules:
    """A state of which a part belongs on the modules."""

    cache: Any
    parts: dict[ModuleAttribute, torch.Tensor | None]


def run_opaque(model: PreTrainedModel, opaque: OpaqueState, state: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Run a model on from a state.

    Args:
        model: The model.
        opaque: How it takes its state.
        state: What the last call returned; None before the first. It may be changed.
        arguments: The tokens, and what else the model takes.

    Returns:
        The model's output, and the state after it.
    """
    if not opaque.places:
        output = model(**arguments, **{opaque.argument: state}, use_cache=True)
        return output, getattr(output, opaque.argument, None)
    if state is None:
        state = _OnModules(DynamicCache(config=model.config), dict.fromkeys(opaque.places))
    try:
        for (name, attribute), part in state.parts.items():
            setattr(model.get_submodule(name), attribute, part)
        output = model(**arguments, **{opaque.argument: state.cache}, use_cache=True)
        for name, attribute in opaque.places:
            state.parts[name, attribute] = getattr(model.get_submodule(name), attribute)
    finally:
        for name, attribute in opaque.places:
            setattr(model.get_submodule(name), attribute, None)
    return output, state


@torch.inference_mode()
def find_opaque_state(model: PreTrainedModel) -> OpaqueState:
    """Run a model over a few tokens and measure what it keeps as its state.

    Raises:
        ModelLoadError: it keeps none that can be found, or cannot run.
    """
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    argument = next((known for known in _NAMES if known in parameters), None)
    before = _plain_tensors(model)
    found, sizes = OpaqueState(argument or "", 0, 0), [0, 0]
    try:
        sizes = _sizes(model, found)
        places = tuple(sorted(p for p, tensor in _plain_tensors(model).items() if before.get(p) is not tensor))
        if not sizes[0] and places:
            found = OpaqueState(found.argument, 0, 0, places)
            sizes = _sizes(model, found)
    except Exception as error:
        raise ModelLoadError(f"{name} cannot run with a state: {type(error).__name__}: {error}") from error
    if argument is None or not sizes[0]:
        raise ModelLoadError(f"{name} has recurrent layers and does not give their state away")
    per_token = -(-(sizes[1] - sizes[0]) // (_NUM_TOKENS[1] - _NUM_TOKENS[0]))
    return OpaqueState(argument, max(0, sizes[0] - per_token), max(0, per_token), found.places)


def _sizes(model: PreTrainedModel, opaque: OpaqueState) -> list[int]:
    """Bytes of the state after each of :data:`_NUM_TOKENS`."""
    device, sizes = model.get_input_embeddings().weight.device, []
    for num_tokens in _NUM_TOKENS:
        tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
        if opaque.argument:
            _, state = run_opaque(model, opaque, None, {"input_ids": tokens})
            sizes.append(sum(tensor.nbytes for tensor in _tensors(state, set())))
    return sizes or [0, 0]


def _plain_tensors(model: PreTrainedModel) -> dict[ModuleAttribute, torch.Tensor]:
    """Tensors that modules hold as plain attributes: neither parameters nor buffers."""
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object leads to, each once."""
    if id(value) in seen or value is None or isinstance(value, str | int | float | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, seen)
    elif isinstance(value, _OnModules):
        yield from _tensors(value.cache, seen)
        yield from _tensors(value.parts, seen)
    elif type(value).__module__.startswith("transformers."):
        for item in vars(value).values():
            if not hasattr(item, "to_diff_dict"):  # a configuration holds none
                yield from _tensors(item, seen)


Reader = Callable[[list[int], int, Any], tuple[torch.Tensor, Any]]
"""From tokens, the position of the first, and the state before it, to their logits [n, V] and the state after."""


@dataclass(slots=True)
class _Held:
    """What is held for one slot.

    Attributes:
        state: The model's own, after ``length`` tokens; None before the first.
        length: Tokens it has seen.
        copies: Earlier lengths and the states there, the oldest first; at most two.
    """

    state: Any = None
    length: int = 0
    copies: list[tuple[int, Any]] = field(default_factory=list)


class SnapshotPool:
    """States of many sequences, each a Python object of its model's.

    Args:
        num_slots: Most sequences and branches at once.
        window: How far back they can go.
        reads_many: Whether the model goes on right from a state with several tokens at once; else they are read one
            by one, but for those at a sequence's beginning.
    """

    def __init__(self, num_slots: int, window: Window, reads_many: bool) -> None:
        self.window = window
        self.slots = StateSlots(num_slots)
        self._reads_many = reads_many
        self._held: dict[int, _Held] = {}

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return self.slots.num_free

    @property
    def num_in_use(self) -> int:
        """Slots some sequence or branch holds."""
        return self.slots.num_in_use

    @property
    def num_reusable(self) -> int:
        """Slots kept only for prefix reuse: none."""
        return 0

    def take(self) -> SequenceState | None:
        """The state of an empty sequence; None where no slot is free."""
        state = self.slots.take()
        if state is not None:
            self._held[state.slot] = _Held(copies=[(0, None)])
        return state

    def copy(self, state: SequenceState) -> SequenceState | None:
        """A state of its own that can be brought back like ``state``; None where no slot is free."""
        other = self.slots.take()
        if other is not None:
            other.oldest, other.newest = state.oldest, state.newest
            self._held[other.slot] = copy.deepcopy(self._held[state.slot])
        return other

    def give_back(self, state: SequenceState) -> None:
        """Free a state's slot."""
        self.slots.give_back(state)
        del self._held[state.slot]

    def read(self, state: SequenceState, past: TokenSequence, tokens: list[int], reader: Reader) -> torch.Tensor:
        """Bring a state to ``past`` and read ``tokens`` after it: their logits [n, V]."""
        held = self._held[state.slot]
        length = len(past)
        if held.length != length:
            held.copies = [entry for entry in held.copies if entry[0] <= length]
            held.length, kept = held.copies[-1]
            held.state = copy.deepcopy(kept)
            self._advance(held, as_list(past[held.length :]), reader)
        if length - held.copies[-1][0] >= self.window.num_tokens:
            held.copies = [held.copies[-1], (length, copy.deepcopy(held.state))]
        logits = self._advance(held, tokens, reader)
        state.oldest, state.newest = held.copies[0][0], held.length
        return logits

    def _advance(self, held: _Held, tokens: list[int], reader: Reader) -> torch.Tensor:
        """Read tokens at the state's end."""
        at_once = self._reads_many or held.length == 0
        parts = [tokens] if at_once else [[token] for token in tokens]
        logits = []
        for part in parts:
            if part:
                values, held.state = reader(part, held.length, held.state)
                held.length += len(part)
                logits.append(values)
        return torch.cat(logits) if logits else torch.empty(0)
