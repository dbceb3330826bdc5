"""Which of a model's layers are recurrent, and how their forward is led to states of ours.

The functions that modelling modules call to mix tokens, by name: transformers' names are the same in all of them.

Other functions for those that a layer's forward looks up in its module, for one layer and for a while.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MappingProxyType, MethodType, TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.cache.recurrent.rescan import TensorShape
from specdec.core.errors import ModelLoadError
from specdec.kernels.conv import Convolution, ConvShape
from specdec.kernels.progress import StepProgress
from specdec.kernels.scan import DeltaRule, Mamba1, Mamba2, Scan, is_fast


def names_used(module: nn.Module) -> frozenset[str]:
    """Names that a module's forward looks up, in its modelling module or elsewhere."""
    function = inspect.unwrap(type(module).forward)
    return frozenset(function.__code__.co_names) if isinstance(function, FunctionType) else frozenset()


def with_globals(function: FunctionType, replacements: Mapping[str, object]) -> FunctionType:
    """A copy of a function, decorators and all, whose innermost body finds ``replacements`` among its globals.

    Decorators must be of the kind of :func:`functools.wraps`.
    """
    wrapped = function.__dict__.get("__wrapped__")
    namespace, closure = function.__globals__, function.__closure__
    if wrapped is None:
        namespace = {**namespace, **replacements}
    else:
        inner = with_globals(wrapped, replacements)
        closure = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in closure or ())
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an instance's forward is put: accelerate's hooks keep it elsewhere."""

    module: nn.Module
    attribute: str
    forward: Callable[..., Any]


class ScopedFunctions:
    """Puts functions in place of those that some layers look up, and takes them out again: a context manager.

    Each layer gets a copy of its own class's forward that finds other globals, on the instance alone: other models of
    the same class, and other threads that run them, see nothing of it. To be entered by one thread at a time.

    Args:
        replacements: The layers, and by name what each is to find.
    """

    def __init__(self, replacements: Iterable[tuple[nn.Module, Mapping[str, Callable[..., Any]]]]) -> None:
        self._places = [_place(module, functions) for module, functions in replacements]
        self._before: list[object] = []

    def __enter__(self) -> None:
        assert not self._before, "entered twice"
        self._before = [place.module.__dict__.get(place.attribute) for place in self._places]
        for place in self._places:
            place.module.__dict__[place.attribute] = place.forward

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for place, before in zip(self._places, self._before, strict=True):
            if before is None:
                del place.module.__dict__[place.attribute]
            else:
                place.module.__dict__[place.attribute] = before
        self._before = []


def _place(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> _Place:
    forward = type(module).forward
    assert isinstance(forward, FunctionType)
    attribute = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    return _Place(module, attribute, MethodType(with_globals(forward, functions), module))


CONVOLUTION = "causal_conv1d_fn"
"""A causal convolution over the inputs that ``Cache.update_conv_state`` returned."""

SCANS: MappingProxyType[str, Callable[..., Scan]] = MappingProxyType(
    {
        "torch_chunk_gated_delta_rule": DeltaRule,
        "chunk_kimi_delta_attention": DeltaRule,
        "mamba2_chunk_scan": Mamba2,
        "mamba_selective_scan": Mamba1,
    }
)
"""Scans over many tokens. Those for single tokens, which change a state in place, are never reached: a layer takes
them only where its cache gives it a state."""


def known_functions(namespace: dict[str, Any]) -> set[str]:
    """Which of these names a modelling module has."""
    return {CONVOLUTION, *SCANS} & namespace.keys()


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

    def convolved(self, index: int, convolution: Convolution) -> torch.Tensor:
        """What a layer's convolution gives for the step's tokens, [1, C, N]."""
        ...

    def scanned(self, index: int, scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's scan returns to it."""
        ...


def bind(model: PreTrainedModel, mixer: Mixer, progress: StepProgress | None = None) -> ScopedFunctions:
    """Lead all convolutions and scans of a model to a mixer, while the result is entered.

    Args:
        model: The model.
        mixer: What they are led to.
        progress: Counts them.
    """
    counted = progress or StepProgress()
    return ScopedFunctions((module, _functions(module, mixer, counted)) for module in recurrent_modules(model))


def recurrent_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules whose forward mixes tokens by functions known here."""
    for module in model.modules():
        if names_used(module) & {CONVOLUTION, *SCANS} and isinstance(getattr(module, "layer_idx", None), int):
            yield module


def has_fast_scans(model: PreTrainedModel) -> bool:
    """Whether a package is installed whose kernel goes on from a state over many tokens; Mamba-1's begins anew."""
    names = {name for name, kind in SCANS.items() if kind is not Mamba1}
    spaces = map(_namespace, recurrent_modules(model))
    return any(is_fast(space[name]) for space in spaces for name in names & space.keys())


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
    def convolve(
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> torch.Tensor:
        outputs = mixer.convolved(index, Convolution(stock, inputs, weight, bias, activation, options))
        progress.advance(outputs.device)
        return outputs

    return convolve


def _scan(
    stock: Callable[..., Any], kind: Callable[..., Scan], index: int, mixer: Mixer, progress: StepProgress
) -> Callable[..., Any]:
    def scan(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = mixer.scanned(index, kind(stock, *args, **kwargs))
        progress.advance(outputs[0].device)
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

    def convolved(self, index: int, convolution: Convolution) -> torch.Tensor:
        """What it gives for what it was given."""
        if index not in self._convolutions:
            raise ModelLoadError(f"layer {index} has a convolution without a state")
        return convolution.run()

    def scanned(self, index: int, scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
        """The scan from a state of zeros."""
        device = scan.inputs[0].device
        shapes = tuple((tuple(value.shape[2:]), value.dtype) for value in scan.inputs)
        self._scans.setdefault(index, []).append(ScanShape(scan.state_shape, shapes, device))
        outputs, _ = scan.whole(scan.inputs, scan.reads, torch.zeros(1, *scan.state_shape, device=device))
        return scan.result(outputs)
