"""Checkpoints: one file, replaced atomically, that holds all a run needs to go on exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdec.demo.train import models
from specdec.demo.train.optimizers import State


@dataclass(slots=True)
class Checkpoint:
    """A model after ``step`` steps, and its optimizers' state by parameter name."""

    model: PreTrainedModel
    optimizers: State
    step: int
    num_tokens: int
    elapsed_s: float
    decay_start: int | None = None


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Writes the checkpoint; a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model = checkpoint.model
    content = {
        "config": model.config.to_dict(),
        "model": model.state_dict(),
        "optimizers": checkpoint.optimizers,
        "step": checkpoint.step,
        "num_tokens": checkpoint.num_tokens,
        "elapsed_s": checkpoint.elapsed_s,
        "decay_start": checkpoint.decay_start,
    }
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path, device: str = "cpu") -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        FileNotFoundError: There is none at ``path``.
    """
    content = torch.load(path, map_location=device, weights_only=True)
    model = models.from_fields(content["config"]).to(device)
    model.load_state_dict(content["model"])
    rest = {k: content[k] for k in ("optimizers", "step", "num_tokens", "elapsed_s", "decay_start")}
    return Checkpoint(model, **rest)


def load_or_start(path: Path, shape: models.Shape, seed: int, device: str = "cpu") -> Checkpoint:
    """The checkpoint at ``path``, or, where there is none, a new model of a shape before its first step."""
    if path.exists():
        return load(path, device)
    model = models.build(shape, seed).to(device)
    return Checkpoint(model, {}, step=0, num_tokens=0, elapsed_s=0.0)
