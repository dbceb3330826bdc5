"""A decoder layer's own Python as a record of the operators it calls, for any number of tokens.

The layer is run once on inputs that have shapes and no numbers. Where it asks for attention, a mark is left: keys,
values and attention stay the paged cache's. (vLLM's "piecewise" compilation cuts models in the same places.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers import PreTrainedModel

from specdec.models.attention import FROM_MODULE, check_arguments
from specdec.models.compiled.calls import Argument, LayerCall, attention_set, layer_calls
from specdec.models.compiled.graphs import LayerGraphs, Source, cut, lift_weights
from specdec.models.compiled.operators import operators
from specdec.models.packed import PackedLinear, PackedProduct
from specdec.models.probe import ProbeCache
from specdec.models.quantization import is_quantized
from specdec.models.recurrent.binding import RecurrentProbe, recurrent_modules

_NAME = "specdec_tracing"
"""The attention of layers that are recorded."""
_PLAIN = (torch.Tensor, str, int, float, NoneType)
"""Arguments that a layer can only read."""


class TraceError(Exception):
    """A layer does what cannot be recorded; the message says what."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How a layer asks for attention.

    Attributes:
        module: The attention layer.
        index: Of the layer in the cache.
        arguments: Beyond queries, keys and values.
    """

    module: nn.Module
    index: int
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """A layer's record.

    Attributes:
        graphs: What it computes.
        attention: Between the two.
        cache: The argument that is the cache.
        tuple_length: Where the layer's result is a tuple, all but its first being None.
    """

    graphs: LayerGraphs
    attention: AttentionCall
    cache: Argument
    tuple_length: int | None


@dataclass(slots=True)
class _Recorder:
    """Stands for the step's context."""

    cache: ProbeCache = field(default_factory=lambda: ProbeCache(RecurrentProbe()))
    calls: list[AttentionCall] = field(default_factory=list)


def trace_layers(model: PreTrainedModel, num_tokens: int) -> Iterator[tuple[nn.Module, LayerTrace | TraceError]]:
    """Record a model's decoder layers, one after another.

    Args:
        model: In eval mode. It is not changed.
        num_tokens: It is run once over so many, which should be like no other size of it.

    Yields:
        A layer and its record, or why there is none: it depends on numbers, keeps other states than keys and values,
        attends not exactly once to just what it has cached, or leaves something behind beside its result.
    """
    calls, recurrent = layer_calls(model, num_tokens), set(recurrent_modules(model))
    for layer, call in calls.items():
        trace: LayerTrace | TraceError
        try:
            if not recurrent.isdisjoint(layer.modules()):
                raise TraceError("it keeps a recurrent state")
            if any(hasattr(module, "_hf_hook") for module in layer.modules()):
                raise TraceError("accelerate brings its inputs to its device")
            if any(is_quantized(module) for module in layer.modules()):
                raise TraceError("its weights are quantized")
            with attention_set(model, _NAME, _mark), _stand_ins(layer) as packed, _quiet(), torch.no_grad():
                trace = _trace(layer, call, packed, num_tokens)
        except TraceError as error:
            trace = error
        yield layer, trace


def _trace(layer: nn.Module, call: LayerCall, packed: dict[int, torch.Tensor], num_tokens: int) -> LayerTrace:
    recorder, tensors, sizes = _Recorder(), call.find(torch.Tensor), ShapeEnv()
    caches = dict.fromkeys(call.find(ProbeCache), recorder.cache)
    if len(caches) != 1:
        raise TraceError("it is not given the cache")
    for argument, value in call.find(object).items():
        # What other objects hold when the graphs run, or would get from the layer, is not known.
        if argument not in caches and argument.name != "attention_context" and not isinstance(value, _PLAIN):
            raise TraceError(f"it is given a {type(value).__name__}")
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    results: list[Any] = []

    def run(*values: torch.Tensor) -> torch.Tensor:
        args, kwargs = call.filled(dict(zip(tensors, values, strict=True)) | caches)
        results.append(layer.forward(*args, **kwargs | {"attention_context": recorder}))
        return _only_tensor(results[-1])

    try:
        inputs = [_without_numbers(mode, tensor, num_tokens) for tensor in tensors.values()]
        with _nothing_left_behind(layer):
            recorded = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        if len(recorder.calls) != 1:
            raise TraceError(f"it attends {len(recorder.calls)} times")
        if sizes.guards or sizes.replacements:
            raise TraceError("what it does depends on the number of tokens")
        weights = lift_weights(recorded, mode)
        sources: list[Source] = [*tensors, *(packed.get(id(weight), weight) for weight in weights)]
        graphs = cut(recorded, sources)
    except TraceError:
        raise
    except Exception as error:  # whatever a layer's own Python raises
        raise TraceError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    length = len(results[0]) if isinstance(results[0], tuple) else None
    return LayerTrace(graphs, recorder.calls[0], next(iter(caches)), length)


@contextmanager
def _nothing_left_behind(layer: nn.Module) -> Iterator[None]:
    """See that a layer leaves its modules as they are, which a graph would; and take back what it did."""
    modules = [vars(module) for module in layer.modules()]
    places = [*modules, *(one["_buffers"] for one in modules)]
    before = [dict(place) for place in places]
    try:
        yield
    finally:
        is_changed = any(_ids(place) != _ids(old) for place, old in zip(places, before, strict=True))
        for place, old in zip(places, before, strict=True):
            place.clear()
            place.update(old)
    if is_changed:
        raise TraceError("it leaves something behind beside its result")


def _ids(place: dict[Any, Any]) -> dict[Any, int]:
    return {key: id(value) for key, value in place.items()}


def _only_tensor(result: Any) -> torch.Tensor:
    tensor, *others = result if isinstance(result, tuple) else (result,)
    if not isinstance(tensor, torch.Tensor) or any(other is not None for other in others):
        raise TraceError("it gives more than hidden states")
    return tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs what it cannot record, with a trace; here that is an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _without_numbers(mode: FakeTensorMode, tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """A tensor's likeness, in which the number of tokens may be any."""
    sizes = [DimDynamic.DUCK if size == num_tokens else DimDynamic.STATIC for size in tensor.shape]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor.contiguous(), symbolic_context=context)


def _mark(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Any = FROM_MODULE,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_context: _Recorder,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as it is recorded."""
    check_arguments(module, arguments)
    cached = attention_context.cache.states
    index = next((index for index, pair in cached.items() if pair[0] is key and pair[1] is value), None)
    if index is None or len(cached) != 1:
        raise TraceError("it attends to other keys and values than it caches")
    if attention_mask is not None:
        raise TraceError("it makes a mask of its own")
    if s_aux is not None and not isinstance(s_aux, nn.Parameter):
        raise TraceError("it computes its sinks")
    kept = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    attention_context.calls.append(AttentionCall(module, index, kept))
    return operators().attention(query, key, value), None


class _StandIn(PackedProduct):
    """A packed product as it is recorded: with a plain weight of the same size, whose numbers nobody reads."""

    def __init__(self, product: PackedProduct) -> None:
        self.stood_for = product
        self.plain = torch.empty(sum(product.sizes), product.in_features, dtype=torch.bfloat16)
        self._results: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def weight(self, index: int) -> torch.Tensor:
        """Of one layer: its shape, and no numbers."""
        return torch.split_with_sizes(self.plain, self.stood_for.sizes)[index]

    def part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """One layer's result; layers that read the same inputs share an operator."""
        for known, parts in self._results:
            if known is inputs:
                return parts[index]
        result = operators().packed_linear(inputs, self.plain, self.stood_for.bias)
        sizes = self.stood_for.sizes
        parts = list(torch.split_with_sizes(result, sizes, -1)) if len(sizes) > 1 else [result]
        self._results.append((inputs, parts))
        return parts[index]


@contextmanager
def _stand_ins(layer: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Packed weights have no likeness; for a while plain ones stand for them. Gives the packed ones by their ids."""
    linears = [module for module in layer.modules() if isinstance(module, PackedLinear)]
    products = [linear.product for linear in linears]
    stand_ins = {id(product): _StandIn(product) for product in products}
    try:
        for linear, product in zip(linears, products, strict=True):
            linear.product = stand_ins[id(product)]
        yield {id(one.plain): one.stood_for.packed for one in stand_ins.values()}
    finally:
        for linear, product in zip(linears, products, strict=True):
            linear.product = product
