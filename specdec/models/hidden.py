"""What chosen layers of a model read in its newest pass: for heads that draft from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

AFTER_NORM = -1
"""In place of a layer's number: what the model's last norm gives, and its vocabulary head reads."""


class HiddenStates:
    """Notes hidden states in every pass of a model from now on.

    Args:
        model: With its layers in one ``ModuleList``.
        layers: Numbers of layers, from 0, whose input is noted; the number of layers for what the last one gives;
            :data:`AFTER_NORM`.

    Raises:
        ValueError: There is no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._newest: dict[int, Tensor] = {}
        for layer in dict.fromkeys(layers):
            if layer == AFTER_NORM:
                model.base_model.register_forward_hook(self._after(layer))
                continue
            modules = layers_of(model)
            if not 0 <= layer <= len(modules):
                raise ValueError(f"hidden states must be of layers in [0, {len(modules)}], got {layer}")
            if layer < len(modules):
                modules[layer].register_forward_pre_hook(self._before(layer), with_kwargs=True)
            else:
                modules[-1].register_forward_hook(self._after(layer))

    def take(self) -> tuple[Tensor, ...]:
        """Of the newest pass over N tokens, by layer: [N, hidden size]."""
        taken = tuple(self._newest[layer] for layer in self._layers)
        self._newest.clear()
        return taken

    def _before(self, layer: int) -> Callable[..., None]:
        def note(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._newest[layer] = (inputs[0] if inputs else named["hidden_states"])[0]

        return note

    def _after(self, layer: int) -> Callable[..., None]:
        def note(_: nn.Module, inputs: object, output: Any) -> None:
            self._newest[layer] = (output if isinstance(output, Tensor) else output[0])[0]

        return note


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a model.

    Raises:
        ValueError: they are not in one list.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"{type(model).__name__} does not keep its {count} layers in one list")
