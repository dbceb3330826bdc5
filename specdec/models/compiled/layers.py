"""Layers whose forward is two compiled graphs with attention between them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from transformers import PreTrainedModel

from specdec.errors import ModelLoadError
from specdec.models.attention import paged_attention
from specdec.models.compiled.calls import NUM_TOKENS, Argument
from specdec.models.compiled.graphs import Attended, FirstGraphOutput, Source
from specdec.models.compiled.tracing import LayerTrace, TraceError, trace_layers

_OPTIONS = {
    # Between operators that are now one, numbers are rounded as they would be between two.
    "emulate_precision_casts": True,
    # Packed weights have no strides to be compared.
    "size_asserts": False,
}
Graph = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What was compiled.

    Attributes:
        num_layers: Of the model.
        num_compiled: Layers that run compiled.
        num_graphs: Kinds of layers among them, each of which was compiled once.
        reasons: Why the others are not, each once.
    """

    num_layers: int
    num_compiled: int
    num_graphs: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """In a line."""
        kinds = "1 kind" if self.num_graphs == 1 else f"{self.num_graphs} kinds"
        return "; ".join([f"{self.num_compiled} of {self.num_layers} layers compiled, {kinds}", *self.reasons])


class CompiledLayer:
    """Stands for a layer's forward: two compiled graphs, and attention over the paged cache between them.

    Args:
        layer: Its own forward is for those who call it without the paged cache.
        trace: The layer.
        before: The first of its graphs, compiled.
        after: The second.
    """

    def __init__(self, layer: nn.Module, trace: LayerTrace, before: Graph, after: Graph) -> None:
        self._layer = weakref.ref(layer)  # it holds this, and weights are to be freed at once
        self._before, self._after = before, after
        self._before_inputs = _Inputs(trace.graphs.before_inputs)
        self._after_inputs = _Inputs(trace.graphs.after_inputs)
        self._states = trace.graphs.states
        self._module, self._index = trace.attention.module, trace.attention.index
        self._attention_arguments = trace.attention.arguments
        self._cache, self._tuple_length = trace.cache, trace.tuple_length

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward gives, but for rounding."""
        context = kwargs.get("attention_context")
        if context is None:
            layer = self._layer()
            assert layer is not None
            return type(layer).forward(layer, *args, **kwargs)
        kept = self._before(*self._before_inputs.of(args, kwargs, (), None))
        query, key, value = (kept[index] for index in self._states)
        keys, values = self._cache.of(args, kwargs).update(key, value, self._index)
        attended, _ = paged_attention(
            self._module, query, keys, values, None, attention_context=context, **self._attention_arguments
        )
        inputs = self._after_inputs.of(args, kwargs, kept, attended)
        del kept, query, key, value, attended  # of a long prompt as large as all that comes
        result = self._after(*inputs)
        return result if self._tuple_length is None else (result, *(None,) * (self._tuple_length - 1))


class _Inputs:
    """A graph's inputs: weights, and what is found anew at every call."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._weights = [source if isinstance(source, torch.Tensor) else None for source in sources]
        self._kept = [(slot, one.index) for slot, one in enumerate(sources) if isinstance(one, FirstGraphOutput)]
        self._attended = [slot for slot, one in enumerate(sources) if isinstance(one, Attended)]
        self._arguments = [(slot, one) for slot, one in enumerate(sources) if isinstance(one, Argument)]

    def of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], kept: Sequence[Any], attended: torch.Tensor | None
    ) -> list[Any]:
        """All inputs in order."""
        inputs: list[Any] = self._weights.copy()
        for slot, argument in self._arguments:
            inputs[slot] = argument.of(args, kwargs).contiguous()
        for slot, index in self._kept:
            inputs[slot] = kept[index]
        for slot in self._attended:
            inputs[slot] = attended
        return inputs


def compile_layers(model: PreTrainedModel, name: str, max_model_len: int) -> CompileReport:
    """Compile a model's decoder layers, but for attention.

    Layers that cannot be recorded stay as they are: see :func:`specdec.models.compiled.tracing.trace_layers`.

    Args:
        model: In eval mode; changed in place. Layers called without a paged cache run as before.
        name: For messages.
        max_model_len: Most tokens that it reads.

    Raises:
        ModelLoadError: no layer can be compiled, or there is no C++ compiler.
    """
    graphs: dict[str, tuple[Graph, Graph]] = {}
    reasons: Counter[str] = Counter()
    num_compiled = 0
    with torch._inductor.config.patch(compile_threads=1):
        for layer, trace in _traces(model, name, min(NUM_TOKENS, max_model_len)):
            if isinstance(trace, TraceError):
                reasons[f"{type(layer).__name__} is not: {trace}"] += 1
                continue
            text = trace.graphs.text
            if text not in graphs:
                graphs[text] = (_compiled(trace.graphs.before, name), _compiled(trace.graphs.after, name))
            layer.forward = CompiledLayer(layer, trace, *graphs[text])
            num_compiled += 1
    if not num_compiled:
        why = "; ".join(reasons) or "none is known to be a decoder layer"
        raise ModelLoadError(f"no layer of {name} can be compiled ({why}); set compile to false")
    return CompileReport(num_compiled + reasons.total(), num_compiled, len(graphs), tuple(reasons))


def _traces(model: PreTrainedModel, name: str, num_tokens: int) -> Iterator[tuple[nn.Module, LayerTrace | TraceError]]:
    try:
        yield from trace_layers(model, num_tokens)
    except Exception as error:  # the model's own, when it is run to show how it calls its layers
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(
            f"the layers of {name} cannot be compiled: {type(error).__name__}: {reason}; set compile to false"
        ) from error


def _compiled(graph: GraphModule, name: str) -> Graph:
    for node in graph.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")  # where standalone_compile looks for it
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    try:
        compiled: Graph = torch._inductor.standalone_compile(
            graph, examples, dynamic_shapes="from_graph", options={"config_patches": _OPTIONS}, donate_graph_module=True
        )
    except Exception as error:  # the compiler's own, of many kinds
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(
            f"the layers of {name} cannot be compiled: {type(error).__name__}: {reason}; set compile to false"
        ) from error
    return compiled
