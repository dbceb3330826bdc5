"""What OpenVINO runs; imports nothing of it."""

from __future__ import annotations

import torch

from specdec.models.loading import LoadedModel

BLOCK_SIZE = 32
"""Positions of a block, which OpenVINO's attention on CPUs has fixed."""
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""OpenVINO's names of the dtypes that a model may have."""


def refused_reason(loaded: LoadedModel) -> str:
    """Why OpenVINO does not run a model; empty where nothing is known."""
    layers, reason = loaded.attention_layers, ""
    if loaded.device.type != "cpu":
        reason = f"it is on {loaded.device}: set device: cpu"
    elif loaded.dtype not in PRECISIONS:
        reason = f"its dtype must be float32 or bfloat16, not {str(loaded.dtype).removeprefix('torch.')}"
    elif loaded.recurrent_layers or loaded.opaque_state is not None:
        reason = "it has recurrent layers"
    elif any(layer.window is not None or layer.is_latent or not layer.is_plain for layer in layers):
        reason = "its layers must all attend to all positions, without soft caps, sinks and latents"
    elif loaded.adapters is not None:
        reason = "it takes adapters"
    elif loaded.hidden is not None:
        reason = "heads draft from its hidden states"
    return reason
