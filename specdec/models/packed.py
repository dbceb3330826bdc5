"""Linear layers whose weights lie in memory as the CPU's kernels read them.

In bfloat16 torch multiplies with oneDNN, which brings a plain weight into its kernel's own order at every call. For the
few rows of a decoding step that can take as long as the product; here it is done once. (Inductor does the same when it
freezes a model: ``torch._inductor.config.freezing``.) A call has a price of its own, too, so layers that read the same
inputs are multiplied in one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that transformers' decoders give the same inputs. Where a model does otherwise the
results are the same, and only slower."""


class PackedProduct:
    """The weights of linear layers that read the same inputs, one below the other, as oneDNN's kernel reads them.

    Whichever layer is called first multiplies for all of them; the others find their part of the result. Nothing is
    held once the last of them has its own, or the inputs are gone. For one thread at a time, and inputs that are not
    changed between the first layer's call and the last one's.

    Args:
        linears: On a CPU, of the same input width, all with a bias or none; their weights are not kept.

    Attributes:
        sizes: Output widths.
        in_features: Input width.
        packed: All weights.
        bias: All biases, [sum of sizes]; None where there are none.
        added: Adds something to all results, in place, given the inputs and the results, [..., sum of sizes]; None:
            nothing.
        alignment: Layers are multiplied together where each is a multiple of so many rows.
    """

    alignment = 1
    added: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.in_features = linears[0].in_features
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self._inputs: weakref.ref[torch.Tensor] | None = None
        self._parts: dict[int, torch.Tensor] = {}
        self.packed = self._pack([linear.weight for linear in linears])

    def _pack(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight.default(
            torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
        )
        return packed

    def weight(self, index: int) -> torch.Tensor:
        """Of one layer, [out_features, in_features], a copy."""
        weight: torch.Tensor = torch.split_with_sizes(self.packed.to_dense(), self.sizes)[index]
        return weight

    def part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """One layer's result, [..., in_features] -> [..., out_features]; of several layers a view."""
        if len(self.sizes) == 1:
            return self._result(inputs)
        if self._inputs is None or self._inputs() is not inputs or index not in self._parts:
            parts = torch.split_with_sizes(self._result(inputs), self.sizes, -1)
            self._inputs, self._parts = weakref.ref(inputs, self._drop), dict(enumerate(parts))
        return self._parts.pop(index)

    def _drop(self, inputs: weakref.ref[torch.Tensor]) -> None:
        """Some layer has not asked for its part, and cannot any more."""
        if inputs is self._inputs:
            self._inputs, self._parts = None, {}

    def _result(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self._multiplied(inputs)
        if self.added is not None:
            self.added(inputs, output)
        return output

    def _multiplied(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._multiply(inputs, self.packed, self.bias, "none", [], "")
        return output


class PackedLinear(nn.Module):
    """A linear layer's twin, with the same results but for rounding: its kernel may add in another order.

    Args:
        linear: On a CPU; its weight is not kept.
        product: Multiplies for this layer; by default for no other.
        index: The layer's place in that.

    Attributes:
        product: What multiplies.
    """

    def __init__(self, linear: nn.Linear, product: PackedProduct | None = None, index: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.product = PackedProduct([linear]) if product is None else product
        self._index = index

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], a copy: some models' layers read it."""
        return self.product.weight(self._index)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self.product.part(self._index, inputs)


def pack_linear_layers(model: nn.Module) -> int:
    """Replace linear layers by packed ones, where that is faster and in the end takes no more memory.

    These are layers in bfloat16 on a CPU that multiplies in it (float16 would differ in the last bits), or in bfloat16
    with quantized weights, whose weight no other module shares (an embedding, as a rule), and that no library has put
    hooks on.

    Args:
        model: Is changed in place, and cannot be trained or saved afterwards.

    Returns:
        Number of layers replaced.
    """
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    num_packed = 0
    # No linear layer among them: each plain weight goes before the next packed one comes.
    for parent in [module for module in model.modules() if not isinstance(module, nn.Linear)]:
        linears = {
            name: child
            for name, child in parent.named_children()
            if type(child) is nn.Linear and uses[id(child.weight)] == 1 and packed_product(child) is not None
        }
        names = list(linears)
        num_packed += len(names)
        while names:
            group = _siblings(names[0], linears)
            kind = packed_product(linears[group[0]])
            assert kind is not None
            product = kind([linears[name] for name in group])
            for index, name in enumerate(group):
                setattr(parent, name, PackedLinear(linears.pop(name), product, index))
                names.remove(name)
    return num_packed


def _siblings(name: str, linears: dict[str, nn.Linear]) -> tuple[str, ...]:
    """The layers to multiply together with this one, itself among them."""
    for group in SIBLINGS:
        if name in group and all(other in linears for other in group):
            members = [linears[other] for other in group]
            kind = packed_product(members[0])
            are_alike = len({(one.in_features, one.bias is None, packed_product(one)) for one in members}) == 1
            if are_alike and kind is not None and not any(one.out_features % kind.alignment for one in members):
                return group
    return (name,)


def packed_product(layer: nn.Linear) -> type[PackedProduct] | None:
    """What multiplies with a layer's weight faster than the layer itself; None where nothing does."""
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or hasattr(layer, "_hf_hook"):
        return None
    if type(weight) is not nn.Parameter:  # torchao, which not everybody has
        from specdec.models.quantized import quantized_product

        return quantized_product(layer)
    has_mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return PackedProduct if has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported() else None
