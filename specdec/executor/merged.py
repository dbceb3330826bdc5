"""Linear layers that read the same input as one matrix product, where layers are compiled.

Their weights become stretches of rows of one tensor. Compiled, each of them takes its columns of the whole product, and
of equal products in a piece of compiled code only the first stays. Operator by operator each one multiplies by its own
weight, as before. So a model keeps its modules, its parameters and its code, and nothing is kept between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of such layers in transformers' models."""


class MergedLinear(nn.Linear):
    """One of the layers of a product.

    Attributes:
        whole: The weights of all, [output width of all, input width].
        whole_bias: Likewise, if they have any.
        start: The first column of its own output.
    """

    whole: Tensor
    whole_bias: Tensor | None
    start: int

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``: [.., input width] -> [.., output width]."""
        if not torch.compiler.is_compiling():
            return super().forward(input)
        whole = functional.linear(input, self.whole, self.whole_bias)
        return whole[..., self.start : self.start + self.out_features]


def merge_weights(layers: Iterable[nn.Module]) -> list[list[nn.Linear]]:
    """Put the weights of linear layers that read the same input behind one another, where they are not so yet.

    A layer's other parameters move as well. So the memory that a layer leaves is in one piece, into which the next one
    fits.

    Args:
        layers: Of a model.

    Returns:
        The linear layers of each product. None of them is special, for example quantized.
    """
    products: list[list[nn.Linear]] = []
    # What is made in inference mode could not be changed outside of it.
    with torch.inference_mode(False), torch.no_grad():
        for layer in layers:
            own = list(_products_of(layer))
            products += own
            groups = [group for linears in own for group in _parameters_of(linears)]
            if all(map(_lie_together, groups)):
                continue
            moved: dict[Tensor, Tensor] = {}
            for group in groups:
                moved |= zip(group, torch.split(torch.cat(group), [len(one) for one in group]), strict=True)
            for other in set(layer.parameters()) - moved.keys():
                moved[other] = other.data.clone()
            for parameter, data in moved.items():
                parameter.data = data
    return products


def merge(layers: Iterable[nn.Module]) -> list[MergedLinear]:
    """Let compiled code compute each product once; see :func:`share_products` and :func:`unmerge`.

    Args:
        layers: Of a model.

    Returns:
        The linear layers that are parts of a product now.
    """
    from torch._dynamo import mark_static  # a large part of torch

    merged: list[MergedLinear] = []
    for linears in merge_weights(layers):
        whole, *bias = (_whole(group) for group in _parameters_of(linears))
        for one in (whole, *bias):
            mark_static(one)  # its sizes are those of the model, as a parameter's are
        start = 0
        for linear in linears:
            linear.__class__ = MergedLinear
            assert isinstance(linear, MergedLinear)
            linear.whole, linear.whole_bias, linear.start = whole, bias[0] if bias else None, start
            start += linear.out_features
            merged.append(linear)
    return merged


def unmerge(merged: Iterable[MergedLinear]) -> None:
    """Make them plain linear layers again, whose weights stay where they are."""
    for linear in merged:
        del linear.whole, linear.whole_bias, linear.start
        linear.__class__ = nn.Linear  # type: ignore[assignment]


@cache
def share_products(backend: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that computes products of the same input and weights once.

    It is one for all models: what one backend has compiled serves no other, and torch compiles a piece of code eight
    times in a process at most, and then leaves it as it is.

    Args:
        backend: Compiles a graph and its inputs.
    """

    def compile_once(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        products: dict[object, fx.Node] = {}
        for node in graph.graph.find_nodes(op="call_function", target=functional.linear):
            first = products.setdefault((node.args, *node.kwargs.items()), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.graph.erase_node(node)
        graph.recompile()
        return backend(graph, inputs)

    return compile_once


def _products_of(layer: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in layer.modules():
        for names in _SAME_INPUT:
            linears = [getattr(module, name, None) for name in names]
            if all(type(one) is nn.Linear for one in linears) and len(set(map(_kind, linears))) == 1:
                yield linears  # type: ignore[misc]


def _kind(linear: Any) -> tuple[object, ...]:
    return linear.in_features, linear.bias is None, linear.weight.dtype, linear.weight.device


def _parameters_of(linears: list[nn.Linear]) -> list[list[Tensor]]:
    """Their weights; and their biases, if they have any."""
    kinds: list[list[Tensor]] = [[one.weight for one in linears]]
    return kinds if linears[0].bias is None else [*kinds, [one.bias for one in linears]]


def _lie_together(group: list[Tensor]) -> bool:
    """Whether each begins where the one before it ends."""
    same = {one.untyped_storage()._cdata for one in group}
    return len(same) == 1 and all(a.storage_offset() + a.numel() == b.storage_offset() for a, b in pairwise(group))


def _whole(group: list[Tensor]) -> Tensor:
    first = group[0].data
    return first.as_strided((sum(map(len, group)), *first.shape[1:]), first.stride())
