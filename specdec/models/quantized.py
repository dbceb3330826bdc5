"""Products with quantized weights on a CPU, by torch's own kernels: torchao's tensors reach slower ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specdec.models.packed import PackedProduct

FEW_ROWS = 16
"""Of more inputs the int8 kernel, which takes them one by one, is slower than a product with weights brought back."""


class QuantizedProduct(PackedProduct):
    """A packed product of quantized weights."""

    def weight(self, index: int) -> torch.Tensor:
        """Of one layer, as it multiplies: [out_features, in_features]."""
        rows = self._multiplied(torch.eye(self.in_features, dtype=torch.bfloat16))
        if self.bias is not None:
            rows = rows - self.bias
        return torch.split_with_sizes(rows, self.sizes, -1)[index].t()


class Int8Product(QuantizedProduct):
    """Weights in int8 with a scale for each row."""

    def _pack(self, weights: Sequence[Any]) -> torch.Tensor:
        # Rounded as the kernel wants them: an error far below that of the weights.
        self._scales = torch.cat([weight.scale.flatten() for weight in weights]).to(torch.bfloat16)
        self._multiply = torch.ops.aten._weight_int8pack_mm.default
        return torch.cat([weight.qdata for weight in weights])

    def _multiplied(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features).contiguous()
        if len(rows) > FEW_ROWS:
            output = functional.linear(rows, self.packed.to(rows.dtype)).mul_(self._scales)
        else:
            output = self._multiply(rows, self.packed, self._scales)
        if self.bias is not None:
            output += self.bias
        return output.view(*inputs.shape[:-1], sum(self.sizes))


class Int4Product(QuantizedProduct):
    """Weights in int4 with a scale and a zero for each group of a row."""

    alignment = 64
    """The kernel's block of rows."""

    def _pack(self, weights: Sequence[Any]) -> torch.Tensor:
        self._group_size: int = weights[0].block_size[1]
        self._scale_and_zero = torch.cat([weight.scale_and_zero for weight in weights], 1)
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        return torch.cat([weight.qdata for weight in weights])

    def _multiplied(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features).contiguous()
        output: torch.Tensor = self._multiply(rows, self.packed, self._group_size, self._scale_and_zero)
        if self.bias is not None:
            output += self.bias
        return output.view(*inputs.shape[:-1], sum(self.sizes))


def quantized_product(layer: nn.Linear) -> type[QuantizedProduct] | None:
    """What multiplies with a layer's quantized weight in bfloat16 on a CPU; None: torchao's tensor itself."""
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor
    from torchao.quantization import Int8Tensor

    weight: Any = layer.weight
    if isinstance(weight, Int4OpaqueTensor):
        return Int4Product if weight.act_mapping_type is None and weight.act_pre_scale is None else None
    if not isinstance(weight, Int8Tensor) or weight.act_pre_scale is not None or weight.act_quant_scale is not None:
        return None
    is_symmetric = weight.zero_point is None or not weight.zero_point.any()
    return Int8Product if is_symmetric and weight.scale.numel() == layer.out_features else None
