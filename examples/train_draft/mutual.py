"""The last phase: target and draft learn from each other (Zhang et al. 2018, "Deep Mutual Learning", section 2).

A draft this small cannot follow its target everywhere. A target has many ways of being as good on held-out text, and
in this phase chooses one that its draft can follow: it learns a mixture of the text and of the draft's distribution,
and the draft goes on learning the target's. What the target pays for that is its loss on held-out text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from examples.train_draft import checkpoints, loop
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.distill import divergence, log_probs
from examples.train_draft.loop import LossFunction, Plan, Student
from examples.train_draft.optimizers import Rates
from examples.train_draft.tokens import batches


@dataclass(frozen=True, slots=True)
class Exchange:
    """What each learns from the other."""

    draft_share: float = 0.5
    """Share of the draft in the mixture that the target learns; the text has the rest."""
    tv_weight: float = 0.5
    """Weight of the total variation beside the KL in what the draft learns."""
    target_rate: float = 0.3
    """The target's learning rates, as a share of the draft's: it has learnt most of what it can."""


def mutual_loss(target: PreTrainedModel, draft: PreTrainedModel, exchange: Exchange) -> LossFunction:
    """Losses of the target and of the draft; neither gives gradients to the other."""

    def losses_of(windows: Tensor) -> Tensor:
        inputs, labels = windows[:, :-1], windows[:, 1:].flatten()
        of_target, of_draft = log_probs(target, inputs), log_probs(draft, inputs)
        on_text = functional.nll_loss(of_target, labels)
        on_draft = divergence(of_target, of_draft.detach(), tv_weight=0.0)
        return torch.stack(
            (
                torch.lerp(on_text, on_draft, exchange.draft_share),
                divergence(of_draft, of_target.detach(), exchange.tv_weight),
            )
        )

    return losses_of


def train_mutually(
    text: np.ndarray, exchange: Exchange, plan: Plan, rates: Rates, paths: tuple[Path, Path], device: str = "cpu"
) -> tuple[Checkpoint, Checkpoint]:
    """Trains, or goes on training, a target and its draft with each other.

    Args:
        text: Training tokens, uint16 [num_tokens].
        exchange: What they learn from each other.
        plan: How long, and how steps are made.
        rates: The draft's learning rates.
        paths: Checkpoints of target and draft, which must be there.
        device: Where both models run.

    Returns:
        The checkpoints reached, of target and draft.

    Raises:
        ValueError: The checkpoints are not of one step.
    """
    target, draft = checkpoints.load_together(paths, device)
    slower = replace(rates, matrices=rates.matrices * exchange.target_rate, others=rates.others * exchange.target_rate)
    source = batches(text, plan.window_tokens, plan.batch_size, plan.seed, target.step * plan.batch_size)
    students = [Student(target, slower, paths[0]), Student(draft, rates, paths[1])]
    loop.train(students, source, plan, mutual_loss(target.model, draft.model, exchange))
    return target, draft
