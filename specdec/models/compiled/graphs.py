"""A recorded layer as two graphs: what comes before its attention, and what comes after."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from specdec.models.compiled.calls import Argument
from specdec.models.compiled.operators import operators


@dataclass(frozen=True, slots=True)
class FirstGraphOutput:
    """A result of the first graph, by its index."""

    index: int


@dataclass(frozen=True, slots=True)
class Attended:
    """The result of attention."""


Source = Argument | FirstGraphOutput | Attended | torch.Tensor
"""Where an input of a graph comes from; a tensor is a weight."""


@dataclass(frozen=True, slots=True)
class LayerGraphs:
    """A layer, cut at its attention.

    Attributes:
        before: Gives a tuple of what is kept, queries, keys and values among it.
        after: Gives the layer's result.
        before_inputs: Where the inputs of ``before`` come from.
        after_inputs: The same of ``after``.
        states: Which of what is kept are queries, keys and values.
        text: The same for layers that differ in their weights' numbers alone.
    """

    before: GraphModule
    after: GraphModule
    before_inputs: tuple[Source, ...]
    after_inputs: tuple[Source, ...]
    states: tuple[int, ...]
    text: str


def lift_weights(recorded: GraphModule, mode: FakeTensorMode) -> list[torch.Tensor]:
    """Make the tensors that a graph holds inputs of it, after those it has; gives them."""
    graph = recorded.graph
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    found: dict[object, Node] = {}
    weights: list[torch.Tensor] = []
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        if node.target not in found:
            weight = getattr(recorded, str(node.target))
            with graph.inserting_after(last):
                last = found[node.target] = graph.placeholder(f"weight_{len(found)}")
            last.meta["val"] = mode.from_tensor(weight.detach(), static_shapes=True)
            weights.append(weight.detach() if isinstance(weight, nn.Parameter) else weight)
        node.replace_all_uses_with(found[node.target])
        graph.erase_node(node)
    graph.eliminate_dead_code()
    recorded.recompile()
    return weights


def cut(recorded: GraphModule, sources: Sequence[Source]) -> LayerGraphs:
    """Cut a recorded layer at its one attention.

    Args:
        recorded: With nothing but inputs and operators.
        sources: Of its inputs.
    """
    attention, part, parts = operators().attention, 0, {}
    for node in recorded.graph.nodes:
        if node.target is attention:
            parts[node], part = 1, 2
        else:
            parts[node] = part
    text = recorded.print_readable(print_output=False, include_stride=True, include_device=True)
    whole = split_module(recorded, cast(nn.Module, None), parts.__getitem__)
    calls = {str(node.target): node for node in whole.graph.nodes if node.op == "call_module"}
    before, marked, after = (calls[f"submod_{part}"] for part in range(3))
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    where: dict[Any, Source] = dict(zip(inputs, sources, strict=True)) | {marked: Attended()}
    kept = {node: cast(int, node.args[1]) for node in before.users if node.target is operator.getitem}
    where |= {node: FirstGraphOutput(index) for node, index in kept.items()}
    return LayerGraphs(
        before=cast(GraphModule, whole.submod_0),
        after=cast(GraphModule, whole.submod_2),
        before_inputs=tuple(where[node] for node in before.args),
        after_inputs=tuple(where[node] for node in after.args),
        states=tuple(kept[cast(Node, node)] for node in marked.args),
        text=text,
    )
