"""Which of a model's layers are recurrent, and how their forward is led to states of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.cache.recurrent.functions import ScopedFunctions, names_used
from specdec.cache.recurrent.kinds import CONVOLUTION, SCANS, known_functions
from specdec.cache.recurrent.rescan import TensorShape
from specdec.core.errors import ModelLoadError
from specdec.core.types import StepProgress
from specdec.kernels.conv import ConvShape
from specdec.kernels.scan import Scan


@dataclass(frozen=True, slots=True)
class ScanShape:
    """One scan of a layer.

    Attributes:
        state_shape: Of one sequence's state, which is float32.
        input_shapes: Shape and dtype of what moves it, per token.
        device: Of all of it.
    """

    state_shape: tuple[int, ...]
    input_shapes: tuple[TensorShape, ...]
    device: torch.device


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """What one layer keeps per sequence.

    Attributes:
        index: The layer's index in the cache.
        convolution: None where there is none.
        scans: Usually one; none where the convolution is all; one per head in zamba.
    """

    index: int
    convolution: ConvShape | None
    scans: tuple[ScanShape, ...]

    @property
    def device(self) -> torch.device:
        """Where it is kept."""
        return self.scans[0].device if self.convolution is None else self.convolution.device


class Mixer(Protocol):
    """Where the layers' tokens are mixed."""

    def convolved(self, index: int, outputs: torch.Tensor) -> torch.Tensor:
        """Of the outputs [1, C, M] of a layer's convolution, those of the step's tokens, [1, C, N]."""
        ...

    def scanned(self, index: int, scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's scan returns to it."""
        ...


def bind(model: PreTrainedModel, mixer: Mixer, progress: StepProgress | None = None) -> ScopedFunctions:
    """Lead all convolutions and scans of a model to a mixer, while the result is entered.

    Args:
        model: The model.
        mixer: What they are led to.
        progress: Is told of each that is done.
    """
    counted = progress or StepProgress()
    return ScopedFunctions((module, _functions(module, mixer, counted)) for module in recurrent_modules(model))


def recurrent_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules whose forward mixes tokens by functions known here."""
    for module in model.modules():
        if names_used(module) & {CONVOLUTION, *SCANS} and isinstance(getattr(module, "layer_idx", None), int):
            yield module


def _functions(module: nn.Module, mixer: Mixer, progress: StepProgress) -> Mapping[str, Callable[..., Any]]:
    index = module.layer_idx
    assert isinstance(index, int)
    namespace = _namespace(module)
    functions: dict[str, Callable[..., Any]] = {}
    for name in known_functions(namespace):
        if name == CONVOLUTION:
            functions[name] = _convolution(namespace[name], index, mixer, progress)
        else:
            functions[name] = _scan(namespace[name], SCANS[name], index, mixer, progress)
    return functions


def _convolution(
    stock: Callable[..., torch.Tensor], index: int, mixer: Mixer, progress: StepProgress
) -> Callable[..., torch.Tensor]:
    def convolve(*args: Any, **kwargs: Any) -> torch.Tensor:
        outputs = mixer.convolved(index, stock(*args, **kwargs))
        progress.advance()
        return outputs

    return convolve


def _scan(
    stock: Callable[..., Any], kind: Callable[..., Scan], index: int, mixer: Mixer, progress: StepProgress
) -> Callable[..., Any]:
    def scan(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = mixer.scanned(index, kind(stock, *args, **kwargs))
        progress.advance()
        return outputs

    return scan


def _namespace(module: nn.Module) -> dict[str, Any]:
    import sys

    return vars(sys.modules[type(module).__module__])


class RecurrentProbe:
    """Notes what layers hand over in one forward pass of a few tokens; keeps nothing."""

    def __init__(self) -> None:
        self._convolutions: dict[int, ConvShape] = {}
        self._scans: dict[int, list[ScanShape]] = {}

    @property
    def layers(self) -> dict[int, RecurrentLayer]:
        """What was found."""
        indices = sorted({*self._convolutions, *self._scans})
        return {i: RecurrentLayer(i, self._convolutions.get(i), tuple(self._scans.get(i, ()))) for i in indices}

    def extended(self, inputs: torch.Tensor, index: int, state_idx: int, kernel_size: int | None) -> torch.Tensor:
        """What ``Cache.update_conv_state`` is given: inputs [1, C, N]."""
        if state_idx or kernel_size is None or index in self._convolutions:
            raise ModelLoadError(f"layer {index} has convolutions of a kind that is not supported")
        self._convolutions[index] = ConvShape(inputs.shape[1], kernel_size, inputs.dtype, inputs.device)
        return inputs

    def convolved(self, index: int, outputs: torch.Tensor) -> torch.Tensor:
        """The outputs as they are."""
        if index not in self._convolutions:
            raise ModelLoadError(f"layer {index} has a convolution without a state")
        return outputs

    def scanned(self, index: int, scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
        """The scan from a state of zeros."""
        device = scan.inputs[0].device
        shapes = tuple((tuple(value.shape[2:]), value.dtype) for value in scan.inputs)
        self._scans.setdefault(index, []).append(ScanShape(scan.state_shape, shapes, device))
        outputs, _ = scan.whole(scan.inputs, scan.reads, torch.zeros(1, *scan.state_shape, device=device))
        return scan.result(outputs)
