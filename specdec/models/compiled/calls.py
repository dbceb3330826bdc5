"""How a model calls its decoder layers, found by letting it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from specdec.models.probe import ProbeCache, cache_argument
from specdec.models.recurrent.binding import RecurrentProbe, bind

NUM_TOKENS = 37
"""Of the calls, where a model reads as many: no other size of it is likely to be the same."""
_NAME = "specdec_showing"
"""The attention of the forward that shows the calls."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Argument:
    """One of a layer's arguments, or a part of one.

    Attributes:
        name: Its place, or its keyword.
        part: Its index where the argument is a tuple.
    """

    name: int | str
    part: int | None = None

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Its value in a call."""
        value = args[self.name] if isinstance(self.name, int) else kwargs[self.name]
        return value if self.part is None else value[self.part]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a model passes to one of its layers."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def find(self, kind: type[Value]) -> dict[Argument, Value]:
        """The arguments of a kind, parts of tuples among them."""
        values: dict[int | str, Any] = dict(enumerate(self.args))
        values.update(self.kwargs.items())
        found: dict[Argument, Any] = {}
        for name, value in values.items():
            if isinstance(value, tuple):
                found |= {Argument(name, part): one for part, one in enumerate(value)}
            else:
                found[Argument(name)] = value
        return {argument: value for argument, value in found.items() if isinstance(value, kind)}

    def filled(self, values: Mapping[Argument, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with others in their places."""

        def fill(name: int | str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(values.get(Argument(name, part), one) for part, one in enumerate(value))
            return values.get(Argument(name), value)

        args = [fill(place, value) for place, value in enumerate(self.args)]
        return args, {name: fill(name, value) for name, value in self.kwargs.items()}


def layer_calls(model: PreTrainedModel, num_tokens: int) -> dict[nn.Module, LayerCall]:
    """What a model passes to each of its decoder layers when it is run as the runner does.

    Args:
        model: In eval mode.
        num_tokens: It is run once over so many.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    calls: dict[nn.Module, LayerCall] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[layer] = LayerCall(args, dict(kwargs))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    device = model.get_input_embeddings().weight.device
    recurrent = RecurrentProbe()
    try:
        with attention_set(model, _NAME, _attend_nothing), bind(model, recurrent), torch.no_grad():
            model(
                input_ids=torch.zeros(1, num_tokens, dtype=torch.long, device=device),
                position_ids=torch.arange(num_tokens, device=device).unsqueeze(0),
                use_cache=True,
                logits_to_keep=1,
                attention_context=recurrent,
                **{cache_argument(model): ProbeCache(recurrent)},
            )
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@contextmanager
def attention_set(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another attention function for a while, and no masks."""
    AttentionInterface.register(name, function)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend_nothing(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    batch, num_heads, length, _dim = query.shape
    return query.new_zeros(batch, length, num_heads, value.shape[3]), None
