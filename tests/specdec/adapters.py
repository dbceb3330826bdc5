"""Random LoRA adapters, saved by PEFT, and what PEFT makes of them one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import PreTrainedModel

from specdec.checkpoint.fingerprint import adapter_reference
from specdec.core.types import Adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
RANKS = {"a": (4, ALL), "b": (8, ATTENTION), "c": (16, ["down_proj", "q_proj"]), "d": (64, ALL)}
"""Four adapters: their ranks, and what they adapt."""


def save_adapter(
    folder: Path, model: PreTrainedModel, rank: int = 8, seed: int = 0, strength: float = 1.0, **options: Any
) -> Adapter:
    """Save a random adapter of a model, which is of no more use afterwards.

    ``strength`` is the size of what it adds to a layer's result, about, relative to that result.
    """
    config = LoraConfig(r=rank, **{"target_modules": ALL, "lora_alpha": 2 * rank, **options})
    peft = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                size = parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size * strength**0.5)
    peft.save_pretrained(folder)
    return adapter_reference(folder.name, str(folder))


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, strength: float = 0.25
) -> Adapter:
    """The same by hand, of these layers, without the model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (width_out, width_in) in shapes.items():
        for part, shape in (("A", (rank, width_in)), ("B", (width_out, rank))):
            values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values * strength**0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return adapter_reference(folder.name, str(folder))


def with_adapter(model: PreTrainedModel, adapter: Adapter | None) -> Any:
    """A model as PEFT runs it with an adapter, or as it is."""
    return model if adapter is None else PeftModel.from_pretrained(model, adapter.path).eval()
