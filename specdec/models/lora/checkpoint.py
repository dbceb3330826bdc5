"""A LoRA checkpoint as PEFT writes it: what can be served of it, and its weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from specdec.checkpoint.fingerprint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_fingerprint
from specdec.core.errors import ModelLoadError

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others change the base model's weights, too.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_TAKEN = frozenset(
    {
        # Where it was trained, and how.
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "eva_config", "megatron_core", "runtime_config", "ensure_weight_tying"),
        # The weights themselves say which layers there are, and of what rank.
        *("r", "rank_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_alpha", "alpha_pattern", "use_rslora"),
        "qalora_group_size",
    }
)
"""Fields of a configuration that are used here, or change nothing; all others must be unset."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WIDEST_BYTES = 8
_MAX_HEADER_BYTES = 16 << 20


class AdapterCheckpoint:
    """A checkpoint that fits a model. Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".

    Its files are read once, and not mapped: a file that is written anew while it is read ends no process.

    Args:
        folder: With ``adapter_config.json`` and ``adapter_model.safetensors``.
        shapes: (output width, input width) of each layer that can be adapted, by its name in the model.
        max_rank: Largest rank that there is room for.

    Attributes:
        ranks: Of each layer that it adapts.
        weights: Each adapted layer's name, and its two weights, [rank, input width] and [rank, output width], the
            second one multiplied by the scale; float32.
        fingerprint: Of what was read, as :func:`specdec.checkpoint.fingerprint.adapter_reference` takes it.

    Raises:
        ModelLoadError: It cannot be read or served; the message names the field, layer or tensor.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> None:
        self._folder = folder
        config, self._tensors, self.fingerprint = self._read(max_rank * sum(map(sum, shapes.values())))
        self.ranks: dict[str, int] = {}
        for key in sorted(self._tensors):  # safetensors gives them in another order each time
            self._check(key, self._tensors[key], shapes, max_rank)
        if not self.ranks:
            raise self._refused("it has no weights")
        self.weights = [self._scaled(name, config, rank) for name, rank in self.ranks.items()]

    def _check(self, key: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> None:
        name = key.removesuffix(_DOWN).removesuffix(_UP)
        if name == key or name not in shapes:
            raise self._refused(f"{key} belongs to no linear layer of the model that can be adapted")
        width_out, width_in = shapes[name]
        down = self._tensors.get(name + _DOWN)
        rank = self.ranks[name] = len(down) if down is not None and down.dim() else 0
        wanted = (rank, width_in) if key.endswith(_DOWN) else (width_out, rank)
        if not rank or tensor.shape != wanted or name + _UP not in self._tensors:
            raise self._refused(f"the weights of {name} are not those of a layer of {width_out} x {width_in}")
        if rank > max_rank:
            raise self._refused(f"{key} has rank {rank}; at most {max_rank} is served (lora.max_rank)")
        if tensor.dtype not in _DTYPES:
            raise self._refused(f"{key} has {tensor.dtype}; {', '.join(map(str, _DTYPES))} are served")

    def _scaled(self, name: str, config: Mapping[str, Any], rank: int) -> tuple[str, torch.Tensor, torch.Tensor]:
        try:
            scale = _scale(config, name, rank)
        except (TypeError, ValueError, AttributeError, OverflowError, re.error) as error:
            raise self._refused(f"lora_alpha and alpha_pattern must be numbers: {error}") from error
        # In float32, as PEFT holds them: in a narrower dtype of the file the scale would be rounded in.
        down, up = self._tensors[name + _DOWN].float(), self._tensors[name + _UP].T.float() * scale
        if not all(weight.isfinite().all() for weight in (down, up)):
            raise self._refused(f"the weights of {name} are not all finite numbers")
        return name, down, up

    def _read(self, max_numbers: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
        """The configuration, the tensors by their layers' names, and the fingerprint of both."""
        file = self._folder / ADAPTER_WEIGHTS
        try:
            config = (self._folder / ADAPTER_CONFIG).read_bytes()
            parsed, size = self._parsed(config), file.stat().st_size
            if size > max_numbers * _WIDEST_BYTES + _MAX_HEADER_BYTES:
                raise self._refused(f"{file.name} has {size:,} bytes: its rank is more than is served (lora.max_rank)")
            weights = file.read_bytes()
            tensors = {key.removeprefix(_PREFIX): tensor for key, tensor in load(weights).items()}
        except (OSError, SafetensorError, KeyError) as error:
            raise self._refused(f"it cannot be read: {error}") from error
        return parsed, tensors, adapter_fingerprint(BytesIO(config), BytesIO(weights))

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            config: Any = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._refused(f"{ADAPTER_CONFIG} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise self._refused(f"{ADAPTER_CONFIG} is no object")
        for field, value in config.items():
            if field in _ALLOWED:
                if value not in _ALLOWED[field]:
                    allowed = ", ".join(map(json.dumps, _ALLOWED[field]))
                    raise self._refused(f"{field} is {json.dumps(value)}, and only {allowed} is served")
            elif field not in _TAKEN and value:
                raise self._refused(f"{field} is {json.dumps(value)}, which is not served")
        return config

    def _refused(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"the adapter {self._folder} cannot be served: {reason}")


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """By which a layer's product is multiplied; a pattern stands for the layers whose names it ends."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
    alpha = float(next(matching, config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
