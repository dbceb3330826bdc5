"""The training loop: accumulated batches, schedule, progress with ETA, checkpoints, exact resumption."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from specdec.demo.train import checkpoints
from specdec.demo.train.checkpoints import Checkpoint
from specdec.demo.train.optimizers import Optimizers, Rates

logger = logging.getLogger(__name__)

LossFunction = Callable[[PreTrainedModel, Tensor], Tensor]
"""(model, windows int64 [B, T + 1]) -> mean loss over B * T tokens, a scalar."""


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


def next_token_loss(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Cross-entropy of the next token, in nats."""
    logits = model(windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def train(
    checkpoint: Checkpoint, batches: Iterator[Tensor], plan: Plan, rates: Rates, path: Path, loss_of: LossFunction
) -> None:
    """Brings the checkpoint to ``plan.num_steps`` steps, if the deadline allows, and keeps it at ``path``.

    Args:
        checkpoint: Where to start; changed in place.
        batches: Windows of the steps to come, int64 [batch_size, window_tokens + 1].
        plan: How many steps and of what.
        rates: Learning rates.
        path: The checkpoint's file.
        loss_of: What is minimised.
    """
    optimizers = Optimizers(checkpoint.model, rates)
    optimizers.load_state_dict(checkpoint.optimizers)
    if plan.num_decay_steps and checkpoint.decay_start is None:
        checkpoint.decay_start = max(checkpoint.step, plan.num_steps - plan.num_decay_steps)
    progress = _Progress(checkpoint, plan)
    saved_s = time.monotonic()
    while checkpoint.step < plan.num_steps:
        loss = _step(checkpoint.model, next(batches), plan.micro_batch_size, loss_of)
        optimizers.step(rates.scale(checkpoint.step, checkpoint.decay_start, plan.num_decay_steps))
        checkpoint.step += 1
        checkpoint.num_tokens += plan.batch_size * plan.window_tokens
        progress.add(loss)
        if time.monotonic() - saved_s >= plan.save_every_s:
            _save(checkpoint, optimizers, path, progress)
            saved_s = time.monotonic()
        if plan.is_over:
            break
    _save(checkpoint, optimizers, path, progress)


def _step(model: PreTrainedModel, windows: Tensor, micro_batch_size: int, loss_of: LossFunction) -> float:
    """Leaves the gradients of the mean loss in the model; returns that loss."""
    model.train()
    total = 0.0
    for part in torch.split(windows.to(model.device), micro_batch_size):
        loss = loss_of(model, part) * (len(part) / len(windows))
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def _save(checkpoint: Checkpoint, optimizers: Optimizers, path: Path, progress: _Progress) -> None:
    checkpoint.optimizers = optimizers.state_dict()
    checkpoint.elapsed_s = progress.elapsed_s
    checkpoints.save(checkpoint, path)


class _Progress:
    """Counts, logs, and estimates what is left."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan) -> None:
        self._checkpoint, self._plan = checkpoint, plan
        self._start_s = time.monotonic()
        self._start_step, self._earlier_s = checkpoint.step, checkpoint.elapsed_s
        self._losses: list[float] = []

    @property
    def elapsed_s(self) -> float:
        """Training time in all, earlier runs counted in."""
        return self._earlier_s + time.monotonic() - self._start_s

    def add(self, loss: float) -> None:
        """Takes in one step's loss and logs now and then."""
        self._losses.append(loss)
        step, plan = self._checkpoint.step, self._plan
        if step % plan.log_every_steps:
            return
        step_s = (time.monotonic() - self._start_s) / (step - self._start_step)
        logger.info(
            "step %d/%d  %.2fM tokens  loss %.3f  %.0f tokens/s  ETA %.1f min",
            step,
            plan.num_steps,
            self._checkpoint.num_tokens / 1e6,
            sum(self._losses) / len(self._losses),
            plan.batch_size * plan.window_tokens / step_s,
            (plan.num_steps - step) * step_s / 60,
        )
        self._losses.clear()
