"""Weights in fewer bits: torchao makes them as transformers loads a model, one weight at a time."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, TorchAoConfig

from specdec.checkpoint.fingerprint import optional_version
from specdec.core.errors import ModelLoadError
from specdec.core.types import Quantization

QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

GROUP_SIZE = 32
"""Neighbouring weights of a row that share a scale and a zero in int4."""
_ROWS = 16
"""The int4 kernels take multiples of so many rows."""
_MULTIPLIED_DIRECTLY = ".dt_proj"
"""Mamba-1 multiplies by this layer's weight and does not call the layer; a quantized weight does not allow that."""
_MOST_PACKED, _PACKED_WIDTH = 8, 32
"""Most tokens for which torch's own int8 product on CPUs is the faster one, and what an input's width is a multiple of.

Below 16 it reads beyond its operands. In float32 it is slow for any number."""


def quantizing(
    quantization: Quantization,
    config: PretrainedConfig,
    auto_class: Any,
    name: str,
    device: torch.device,
    dtype: torch.dtype | str,
) -> dict[str, Any]:
    """What transformers' ``from_pretrained`` is to be given so that the weights of linear layers are quantized.

    Embeddings and the vocabulary's head keep the model's dtype: the head decides tokens by small differences, and often
    is the embedding. So do layers whose shape the int4 kernels do not take, Mamba-1's ``dt_proj``, and a mixture's
    experts.

    Args:
        quantization: ``int8`` has a scale per row, ``fp8`` (e4m3) too, ``int4`` a scale and a zero per 32 weights.
        config: Of the model.
        auto_class: Transformers' loader for it.
        name: Of the model, for messages.
        device: Where it will run: the int4 kernels of CPUs and GPUs read different layouts.
        dtype: Of all that is not quantized; ``auto`` is the checkpoint's own.

    Raises:
        ModelLoadError: The checkpoint is quantized already, its dtype is not one that the kernels take, or torchao is
            not installed.
    """
    if quantization == "none":
        return {}
    if quantization not in QUANTIZATIONS:
        raise ModelLoadError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}")
    own = own_quantization(config)
    if own is not None:
        raise ModelLoadError(f"{name} is quantized already ({own}): leave quantization out")
    if quantization == "int4" and dtype not in (torch.bfloat16, "auto"):
        raise ModelLoadError(f"int4 needs dtype bfloat16, in which its kernels multiply: {name} is to have {dtype}")
    optional_version("torchao")
    kept = _unquantized_layers(quantization, config, auto_class)
    return {"quantization_config": TorchAoConfig(_weight_config(quantization, device), modules_to_not_convert=kept)}


class PackedInt8Linear(nn.Linear):
    """On CPUs: a few tokens multiply with an int8 weight as it lies in memory; torchao would widen all of it first."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``: bfloat16 [.., input width] -> [.., output width]."""
        if input.numel() > _MOST_PACKED * self.in_features or torch.compiler.is_compiling():
            return super().forward(input)
        weight: Any = self.weight
        rows = input.reshape(-1, self.in_features).contiguous()
        # The kernel scales in bfloat16, and scales are float32.
        product: Tensor = torch._weight_int8pack_mm(rows, weight.qdata, rows.new_ones(self.out_features))
        product = (product * weight.scale.T).to(input.dtype).view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


def pack_int8(model: nn.Module) -> None:
    """Let int8 linear layers on a CPU multiply a few tokens fast.

    Only for layers that :func:`quantizing` has made. A checkpoint that came quantized may have a scale per group of
    weights, or quantize its inputs too, which this product does not do.
    """
    for module in model.modules():
        if (
            type(module) is nn.Linear
            and is_quantized(module)
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.bfloat16
            and module.in_features % _PACKED_WIDTH == 0
        ):
            module.__class__ = PackedInt8Linear


def own_quantization(config: PretrainedConfig) -> str | None:
    """The method by which a checkpoint is quantized, such as ``gptq``; None where it is not."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return None
    method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
    return str(getattr(method, "value", method))


def is_quantized(module: nn.Module) -> bool:
    """Whether a layer multiplies with a weight that torchao has made."""
    return isinstance(module, nn.Linear) and hasattr(module.weight, "__tensor_flatten__")


def stored_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's parameters and buffers as they are in memory, each shared one once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(_tensor_bytes(tensor) for tensor in tensors.values())


def _tensor_bytes(tensor: Any) -> int:
    """A tensor of several, as torchao's are, tells the size that it stands for, not what its parts take."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    return sum(_tensor_bytes(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])


def _unquantized_layers(quantization: Quantization, config: PretrainedConfig, auto_class: Any) -> list[str]:
    """Return the names of linear layers that keep their dtype, read from the model's structure on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(config)
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (
            module is head
            or name.endswith(_MULTIPLIED_DIRECTLY)
            or (quantization == "int4" and (module.in_features % GROUP_SIZE or module.out_features % _ROWS))
        )
    ]


def _weight_config(quantization: Quantization, device: torch.device) -> Any:
    import torchao.quantization as torchao

    if quantization == "int8":
        return torchao.Int8WeightOnlyConfig()
    if quantization == "fp8":
        return torchao.Float8WeightOnlyConfig()
    if device.type != "cpu":
        return torchao.Int4WeightOnlyConfig(group_size=GROUP_SIZE, int4_packing_format="tile_packed_to_4d")
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=GROUP_SIZE, set_inductor_config=False)
