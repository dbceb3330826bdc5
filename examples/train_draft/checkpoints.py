"""Checkpoints: one file, replaced atomically, that holds all a run needs to go on exactly."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from examples.train_draft import models
from examples.train_draft.optimizers import State

_PARTIAL = ".partial"


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
    save_together([(checkpoint, path)])


def save_together(entries: Sequence[tuple[Checkpoint, Path]]) -> None:
    """Writes checkpoints of one step; after a crash :func:`load_together` gives all the old ones or all the new ones.

    Args:
        entries: Each with its path.
    """
    # All are there in full before the first takes its place: what a crash leaves undone then can be done later.
    written = [(_write(checkpoint, path), path) for checkpoint, path in entries]
    for partial, path in written:
        partial.replace(path)


def copy(source: Path, path: Path) -> None:
    """Copies a checkpoint's file; a crash leaves no part of it at ``path``.

    Raises:
        FileNotFoundError: There is none at ``source``.
    """
    partial = path.with_suffix(_PARTIAL)
    shutil.copyfile(source, partial)
    partial.replace(path)


def _write(checkpoint: Checkpoint, path: Path) -> Path:
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
    partial = path.with_suffix(_PARTIAL)
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    return partial


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


def load_together(paths: Sequence[Path], device: str = "cpu") -> list[Checkpoint]:
    """Reads checkpoints that were saved together, and ends a saving that a crash has cut off between two files.

    Args:
        paths: Where they are.
        device: Where the models go.

    Raises:
        FileNotFoundError: One is missing.
        ValueError: They are not of one step.
    """
    loaded = [load(path, device) for path in paths]
    newest = max(checkpoint.step for checkpoint in loaded)
    for index, path in enumerate(paths):
        if loaded[index].step != newest:
            loaded[index] = _finish(path, loaded[index].step, newest, device)
    return loaded


def _finish(path: Path, reached: int, step: int, device: str) -> Checkpoint:
    """Put in its place what was written for ``step``, but not renamed."""
    partial = path.with_suffix(_PARTIAL)
    try:
        found = load(partial, device)
    except (FileNotFoundError, RuntimeError, EOFError, pickle.UnpicklingError):
        found = None
    if found is None or found.step != step:
        raise ValueError(f"{path} is at step {reached}, and what was trained with it at step {step}: take older copies")
    partial.replace(path)
    return found


def load_or_start(path: Path, shape: models.Shape, seed: int, device: str = "cpu") -> Checkpoint:
    """The checkpoint at ``path``, or, where there is none, a new model of a shape before its first step."""
    if path.exists():
        return load(path, device)
    model = models.build(shape, seed).to(device)
    return Checkpoint(model, {}, step=0, num_tokens=0, elapsed_s=0.0)
