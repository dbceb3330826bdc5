"""Checkpoints of Medusa heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from specdec.drafting.medusa.heads import HeadsConfig


def write_medusa(folder: Path, config: HeadsConfig, weights: Mapping[str, Tensor], **fields: object) -> str:
    """Heads as :func:`specdec.drafting.medusa.heads.load` reads them; returns the folder as text."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict() | fields))
    return str(folder)
