"""Checkpoints: one file, replaced atomically, that holds all a run needs to go on exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.demo.train.optimizers import State


@dataclass(slots=True)
class Checkpoint:
    """A model after ``step`` steps, and its optimizers' state by parameter name."""

    model: LlamaForCausalLM
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
    model = LlamaForCausalLM(LlamaConfig(**content["config"])).float().to(device)
    model.load_state_dict(content["model"])
    rest = {k: content[k] for k in ("optimizers", "step", "num_tokens", "elapsed_s", "decay_start")}
    return Checkpoint(model, **rest)
