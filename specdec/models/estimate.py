"""How much memory a model takes at least, by its files alone: neither weights nor a device are needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoint.configuration import max_model_len
from specdec.checkpoint.weight_files import local_folder, tensor_bytes, weight_files
from specdec.core.errors import ModelLoadError
from specdec.models.loading import ModelSource, load_config

_BITS = {"none": 0, "int8": 8, "int4": 4, "fp8": 8}
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """Lower bounds; 0 where the files do not tell.

    Attributes:
        weights_bytes: Of the weights as they are held.
        bytes_per_token: Of one position's keys and values in all layers.
        max_model_len: The model's longest sequence, in tokens.
    """

    weights_bytes: int = 0
    bytes_per_token: int = 0
    max_model_len: int = 0


def least_memory(source: ModelSource, *, on_gpu: bool) -> LeastMemory:
    """Bounds from a model's ``config.json`` and the headers of its weights, where its files are on this machine.

    Args:
        source: The model.
        on_gpu: Whether it runs on a GPU: dtype ``auto`` is float32 elsewhere.

    Raises:
        ModelLoadError: The configuration or a file of weights cannot be read.
    """
    folder = local_folder(source.path, source.revision)
    if folder is None:
        return LeastMemory()
    try:
        return _least_memory(replace(source, path=str(folder), revision=None), folder, on_gpu)
    except ModelLoadError:
        if Path(source.path).expanduser().is_dir():
            raise
        return LeastMemory()  # the hub's cache may have a part of the files


def _least_memory(source: ModelSource, folder: Path, on_gpu: bool) -> LeastMemory:
    text = load_config(source).get_text_config(decoder=True)
    stored = getattr(text, "dtype", None)
    stored_bytes = stored.itemsize if isinstance(stored, torch.dtype) else 0
    held_bytes = _SIZES.get(source.dtype, stored_bytes if on_gpu else _SIZES["float32"])
    parameter_bytes = _BITS[source.quantization] / 8 or held_bytes
    weights_bytes = 0
    if stored_bytes and getattr(text, "quantization_config", None) is None:
        file_bytes = sum(sum(tensor_bytes(file).values()) for file in weight_files(folder))
        weights_bytes = int(file_bytes * parameter_bytes / stored_bytes)
    return LeastMemory(weights_bytes, _token_bytes(text, held_bytes), max_model_len(text, source.path))


def _token_bytes(text: Any, itemsize: int) -> int:
    """Of one position's keys and values where all layers are plain attention, else 0: then less may be kept."""
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    heads = getattr(text, "num_attention_heads", None)
    if kinds != {"full_attention"} or not heads or getattr(text, "kv_lora_rank", None):
        return 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return int(2 * text.num_hidden_layers * kv_heads * head_dim * itemsize)
