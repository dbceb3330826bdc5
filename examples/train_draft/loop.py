"""The training loop: accumulated batches, schedule, progress with ETA, checkpoints, exact resumption."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from examples.train_draft import checkpoints
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.optimizers import Optimizers, Rates

logger = logging.getLogger(__name__)

LossFunction = Callable[[Tensor], Tensor]
"""Windows int64 [B, T + 1] -> mean losses over B * T tokens, [num_students]: each with gradients for one student."""


@dataclass(frozen=True, slots=True)
class Student:
    """A model that is trained."""

    checkpoint: Checkpoint
    """Where it starts; changed in place."""
    rates: Rates
    path: Path
    """The checkpoint's file."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a run goes on and how its steps are made."""

    num_steps: int
    """Steps in all, earlier runs counted in."""
    window_tokens: int = 512
    batch_size: int = 4
    micro_batch_size: int = 1
    """Windows in one forward: one keeps a CPU core's data in its cache, a GPU wants the whole batch."""
    seed: int = 1
    num_decay_steps: int = 0
    """The last steps, over which the rates fall to zero; 0 leaves a model to go on from."""
    save_every_s: float = 120.0
    log_every_steps: int = 10
    deadline_s: float = float("inf")
    """The run saves and ends once ``time.monotonic()`` passes this, after one step at least."""

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline_s


def next_token_loss(model: PreTrainedModel) -> LossFunction:
    """Cross-entropy of the next token, in nats, for one student."""

    def loss_of(windows: Tensor) -> Tensor:
        logits = model(windows[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())[None]

    return loss_of


def train(students: Sequence[Student], batches: Iterator[Tensor], plan: Plan, loss_of: LossFunction) -> None:
    """Brings the students to ``plan.num_steps`` steps, if the deadline allows, and keeps them at their paths.

    Args:
        students: What is trained, one step each at a time; the first one's step counts.
        batches: Windows of the steps to come, int64 [batch_size, window_tokens + 1].
        plan: How many steps and of what.
        loss_of: What is minimised.
    """
    checkpoint = students[0].checkpoint
    optimizers = [_optimizers(student, plan) for student in students]
    progress = _Progress(checkpoint, plan)
    saved_s = time.monotonic()
    while checkpoint.step < plan.num_steps:
        losses = _step([student.checkpoint.model for student in students], next(batches), plan, loss_of)
        for student, one in zip(students, optimizers, strict=True):
            reached = student.checkpoint
            one.step(student.rates.scale(reached.step, reached.decay_start, plan.num_decay_steps))
            reached.step += 1
            reached.num_tokens += plan.batch_size * plan.window_tokens
        progress.add(losses)
        if time.monotonic() - saved_s >= plan.save_every_s:
            _save(students, optimizers, progress)
            saved_s = time.monotonic()
        if plan.is_over:
            break
    _save(students, optimizers, progress)


def _optimizers(student: Student, plan: Plan) -> Optimizers:
    checkpoint = student.checkpoint
    optimizers = Optimizers(checkpoint.model, student.rates)
    optimizers.load_state_dict(checkpoint.optimizers)
    if plan.num_decay_steps and checkpoint.decay_start is None:
        checkpoint.decay_start = max(checkpoint.step, plan.num_steps - plan.num_decay_steps)
    return optimizers


def _step(models: Sequence[PreTrainedModel], windows: Tensor, plan: Plan, loss_of: LossFunction) -> Tensor:
    """Leaves the gradients of the mean losses in the models; returns those losses, float64 [num_students]."""
    for model in models:
        model.train()
    total = torch.zeros(len(models), dtype=torch.float64)
    for part in torch.split(windows.to(models[0].device), plan.micro_batch_size):
        losses = loss_of(part) * (len(part) / len(windows))
        torch.autograd.backward(losses.sum())
        total += losses.detach().cpu()
    return total


def _save(students: Sequence[Student], optimizers: Sequence[Optimizers], progress: _Progress) -> None:
    for student, one in zip(students, optimizers, strict=True):
        student.checkpoint.optimizers = one.state_dict()
        student.checkpoint.elapsed_s = progress.elapsed_s
    checkpoints.save_together([(student.checkpoint, student.path) for student in students])


class _Progress:
    """Counts, logs, and estimates what is left."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan) -> None:
        self._checkpoint, self._plan = checkpoint, plan
        self._start_s = time.monotonic()
        self._start_step, self._earlier_s = checkpoint.step, checkpoint.elapsed_s
        self._losses: list[Tensor] = []

    @property
    def elapsed_s(self) -> float:
        """Training time in all, earlier runs counted in."""
        return self._earlier_s + time.monotonic() - self._start_s

    def add(self, losses: Tensor) -> None:
        """Takes in one step's losses, [num_students], and logs now and then."""
        self._losses.append(losses)
        step, plan = self._checkpoint.step, self._plan
        if step % plan.log_every_steps:
            return
        step_s = (time.monotonic() - self._start_s) / (step - self._start_step)
        logger.info(
            "step %d/%d  %.2fM tokens  loss %s  %.0f tokens/s  ETA %.1f min",
            step,
            plan.num_steps,
            self._checkpoint.num_tokens / 1e6,
            " / ".join(f"{loss:.3f}" for loss in torch.stack(self._losses).mean(0).tolist()),
            plan.batch_size * plan.window_tokens / step_s,
            (plan.num_steps - step) * step_s / 60,
        )
        self._losses.clear()
