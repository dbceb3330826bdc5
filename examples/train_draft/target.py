"""Training of the target: few layers first, grown to the full depth, then a decay of the learning rate."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from examples.train_draft import checkpoints, loop, models
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.loop import Plan
from examples.train_draft.optimizers import Rates
from examples.train_draft.tokens import batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """A depth, and the step at which training leaves it."""

    num_layers: int
    last_step: int


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Reads ``layers:last_step`` pairs, such as ``3:900,6:1400,12:3000``.

    Raises:
        ValueError: A pair is malformed, or layers or steps do not rise.
    """
    try:
        stages = tuple(Stage(*map(int, part.split(":"))) for part in text.split(","))
    except (TypeError, ValueError):
        raise ValueError(f"stages must be pairs layers:last_step separated by commas, not {text!r}") from None
    for before, after in itertools.pairwise(stages):
        if after.num_layers % before.num_layers or after.last_step <= before.last_step:
            raise ValueError(f"stages must rise in steps and in multiples of layers, not {text!r}")
    return stages


def train_target(
    text: np.ndarray,
    shape: models.Shape,
    stages: tuple[Stage, ...],
    plan: Plan,
    rates: Rates,
    path: Path,
    device: str = "cpu",
) -> Checkpoint:
    """Trains or goes on training the target at ``path``; ``plan.num_steps`` is ignored: the stages say it.

    Args:
        text: Training tokens, uint16 [num_tokens].
        shape: The target's shape; its depth gives way to the stages'.
        stages: Depths over time.
        plan: How steps are made. Its decay, if any, is the end of the last stage.
        rates: Learning rates.
        path: The checkpoint's file.
        device: Where the model is trained.

    Returns:
        The checkpoint reached, at the end of the stages or of the time.
    """
    checkpoint = checkpoints.load_or_start(path, replace(shape, num_layers=stages[0].num_layers), plan.seed, device)
    for stage in stages:
        if checkpoint.step >= stage.last_step:
            continue
        _deepen(checkpoint, stage.num_layers)
        last = stage is stages[-1]
        stage_plan = replace(plan, num_steps=stage.last_step, num_decay_steps=plan.num_decay_steps if last else 0)
        num_read = checkpoint.num_tokens // plan.window_tokens
        source = batches(text, plan.window_tokens, plan.batch_size, plan.seed, num_read)
        student = loop.Student(checkpoint, rates, path)
        loop.train([student], source, stage_plan, loop.next_token_loss(checkpoint.model))
        if plan.is_over:
            break
    return checkpoint


def _deepen(checkpoint: Checkpoint, num_layers: int) -> None:
    """Grows the checkpoint's model to ``num_layers``, keeping the optimizers' state of the layers it has."""
    if checkpoint.model.config.num_hidden_layers == num_layers:
        return
    device = checkpoint.model.device
    checkpoint.model, old_names = models.grow(checkpoint.model, num_layers)
    checkpoint.model.to(device)
    state = checkpoint.optimizers
    checkpoint.optimizers = {new: state[old] for new, old in old_names.items() if old in state}
    logger.info("grown to %d layers, %d parameters", num_layers, models.num_parameters(checkpoint.model))
