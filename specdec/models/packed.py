"""Linear layers whose weights lie in memory as the CPU's kernels read them.

In bfloat16 torch multiplies with oneDNN, which brings a plain weight into its kernel's own order at every call. For the
few rows of a decoding step that can take as long as the product; here it is done once. (Inductor does the same when it
freezes a model: ``torch._inductor.config.freezing``.)
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn


class PackedLinear(nn.Module):
    """A linear layer's twin, with the same results to the last bit.

    Args:
        linear: On a CPU; its weight is not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight.default(linear.weight.detach())

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], a copy: some models' layers read it."""
        weight: torch.Tensor = self._packed.to_dense()
        return weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        multiply = torch.ops.mkldnn._linear_pointwise.default
        output: torch.Tensor = multiply(inputs, self._packed, self.bias, "none", [], "")
        return output


def pack_linear_layers(model: nn.Module) -> int:
    """Replace linear layers by packed ones, where that is faster and takes no more memory.

    These are layers in bfloat16 on a CPU that multiplies in it (float16 would differ in the last bits), whose weight no
    other module shares (an embedding, as a rule), and that no library has put hooks on.

    Args:
        model: Is changed in place, and cannot be trained or saved afterwards.

    Returns:
        Number of layers replaced.
    """
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and uses[id(child.weight)] == 1 and _is_packable(child)
    ]
    for parent, name in places:  # one after the other: each plain weight goes before the next packed one comes
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    return len(places)


def _is_packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or hasattr(layer, "_hf_hook"):
        return False
    has_mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
