"""A LoRA checkpoint as PEFT writes it: what can be served of it, and its weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specdec.errors import ModelLoadError
from specdec.models.fingerprint import ADAPTER_CONFIG, ADAPTER_WEIGHTS

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


class AdapterCheckpoint:
    """A checkpoint that fits a model. Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".

    Args:
        folder: With ``adapter_config.json`` and ``adapter_model.safetensors``.
        shapes: (output width, input width) of each layer that can be adapted, by its name in the model.
        max_rank: Largest rank that there is room for.

    Attributes:
        ranks: Of each layer that it adapts.

    Raises:
        ModelLoadError: It cannot be read or served; the message names the field, layer or tensor.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> None:
        self._folder = folder
        config = self._read_config()
        self.ranks: dict[str, int] = {}
        try:
            with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
                found = {_without_prefix(key): tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self._refused(f"{ADAPTER_WEIGHTS} cannot be read: {error}") from error
        for key, shape in found.items():
            name = key.removesuffix(_DOWN).removesuffix(_UP)
            if name == key or name not in shapes:
                raise self._refused(f"{key} belongs to no linear layer of the model that can be adapted")
            rank = self.ranks[name] = (found.get(name + _DOWN) or (0,))[0]
            width_out, width_in = shapes[name]
            if shape != ((rank, width_in) if key.endswith(_DOWN) else (width_out, rank)) or name + _UP not in found:
                raise self._refused(f"the weights of {name} are not those of a layer of {width_out} x {width_in}")
            if rank > max_rank:
                raise self._refused(f"{key} has rank {rank}; at most {max_rank} is served (lora.max_rank)")
        if not found:
            raise self._refused("it has no weights")
        try:
            self._scales = {name: _scale(config, name, rank) for name, rank in self.ranks.items()}
        except (TypeError, ValueError, AttributeError, re.error) as error:
            raise self._refused(f"lora_alpha and alpha_pattern must be numbers: {error}") from error

    def weights(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each adapted layer's name, and its two weights: [rank, input width] and [rank, output width].

        The second one is multiplied by the scale.
        """
        with safe_open(self._folder / ADAPTER_WEIGHTS, "pt") as file:
            prefixed = {_without_prefix(key): key for key in file.keys()}  # noqa: SIM118
            for name in self.ranks:
                down, up = (file.get_tensor(prefixed[name + part]) for part in (_DOWN, _UP))
                yield name, down, up.T * self._scales[name]

    def _read_config(self) -> dict[str, Any]:
        try:
            config: Any = json.loads((self._folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
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


def _without_prefix(key: str) -> str:
    return key.removeprefix(_PREFIX)


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """By which a layer's product is multiplied; a pattern stands for the layers whose names it ends."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
    return float(next(matching, config.get("lora_alpha", 8))) / (math.sqrt(rank) if config.get("use_rslora") else rank)
