"""Distillation: the draft learns the target's distributions, on human text and on text the target wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from examples.train_draft import checkpoints, loop, models
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.decode import generate
from examples.train_draft.loop import LossFunction, Plan
from examples.train_draft.optimizers import Rates
from examples.train_draft.tokens import batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target writes text for the draft to learn from."""

    num_windows: int
    window_tokens: int = 512
    num_prompt_tokens: int = 64
    batch_size: int = 32
    greedy_share: float = 0.25
    """Share of the windows written at temperature 0; the others at 1."""
    seed: int = 7

    def temperature(self, batch_number: int) -> float:
        """0 or 1, so that batches of both kinds alternate as the share demands."""
        return float(int((batch_number + 1) * self.greedy_share) == int(batch_number * self.greedy_share))


def write_samples(target: PreTrainedModel, text: np.ndarray, sampling: Sampling, path: Path) -> None:
    """Appends windows written by the target to ``path`` until it holds ``sampling.num_windows`` of them.

    A window is a prompt from the text and what the target makes of it: uint16 [window_tokens + 1]. An interrupted run
    goes on at the next whole batch.
    """
    row_bytes = 2 * (sampling.window_tokens + 1)
    batch_bytes = row_bytes * sampling.batch_size
    num_tokens = sampling.window_tokens + 1 - sampling.num_prompt_tokens
    num_batches = -(-sampling.num_windows // sampling.batch_size)
    done = path.stat().st_size // batch_bytes if path.exists() else 0
    prompts = batches(text, sampling.num_prompt_tokens, sampling.batch_size, sampling.seed, done * sampling.batch_size)
    with path.open("ab") as file:
        file.truncate(done * batch_bytes)
        for number in range(done, num_batches):
            first = sampling.seed * 1_000_000 + number * sampling.batch_size
            seeds = range(first, first + sampling.batch_size)
            rows = generate(
                target, next(prompts)[:, :-1].to(target.device), seeds, num_tokens, sampling.temperature(number)
            )
            file.write(rows.cpu().numpy().astype(np.uint16).tobytes())
            file.flush()
            logger.info("samples %d/%d", (number + 1) * sampling.batch_size, num_batches * sampling.batch_size)


def read_samples(path: Path, window_tokens: int) -> np.ndarray:
    """What ``write_samples`` wrote, uint16 [num_tokens], for ``windows`` to read in whole windows."""
    return np.memmap(path, dtype=np.uint16, mode="r").reshape(-1, window_tokens + 1)


def distillation_loss(draft: PreTrainedModel, target: PreTrainedModel, tv_weight: float) -> LossFunction:
    """Forward KL from the target's distribution to the draft's, plus ``tv_weight`` times their total variation.

    The KL teaches (Hinton et al. 2015; Zhou et al. 2023, "DistillSpec", section 4); the total variation is what
    acceptance loses, and is worth adding at the end.
    """

    def loss_of(windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        with torch.no_grad():
            of_target = log_probs(target, inputs)
        return divergence(log_probs(draft, inputs), of_target, tv_weight)[None]

    return loss_of


def log_probs(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """A model's log probabilities of the next token, float32 [B * T, vocab], after each of ``inputs``, [B, T]."""
    return functional.log_softmax(model(inputs, use_cache=False).logits.flatten(0, 1).float(), -1)


def divergence(of_student: Tensor, of_teacher: Tensor, tv_weight: float) -> Tensor:
    """KL from the teacher's to the student's log probabilities, [N, vocab], and ``tv_weight`` times their distance."""
    kl = functional.kl_div(of_student, of_teacher, reduction="batchmean", log_target=True)
    if not tv_weight:
        return kl
    return kl + tv_weight * (of_teacher.exp() - of_student.exp()).abs().sum(-1).mean() / 2


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the draft learns from."""

    target: PreTrainedModel
    """Gives the distributions."""
    text: np.ndarray
    """Training tokens, uint16 [num_tokens]."""
    samples: np.ndarray | None = None
    """Windows written by the target, uint16 [N, window_tokens + 1]; a quarter of every batch where given."""
    tv_weight: float = 0.0
    """Weight of the total variation beside the KL."""


def train_draft(
    lesson: Lesson, shape: models.Shape, plan: Plan, rates: Rates, path: Path, device: str = "cpu"
) -> Checkpoint:
    """Distils, or goes on distilling, the draft at ``path``.

    Args:
        lesson: Target and texts.
        shape: The draft's shape.
        plan: How long, and how steps are made.
        rates: Learning rates.
        path: The checkpoint's file.
        device: Where both models run.

    Returns:
        The checkpoint reached.
    """
    checkpoint = checkpoints.load_or_start(path, shape, plan.seed, device)
    target = lesson.target.eval().requires_grad_(False)
    source = _mixed(lesson, plan, checkpoint.step)
    loss_of = distillation_loss(checkpoint.model, target, lesson.tv_weight)
    loop.train([loop.Student(checkpoint, rates, path)], source, plan, loss_of)
    return checkpoint


def _mixed(lesson: Lesson, plan: Plan, num_batches: int) -> Iterator[Tensor]:
    """Batches of text and a quarter samples, each sample in turn and around again, from a batch's number on."""
    samples = lesson.samples
    num_samples = plan.batch_size // 4 if samples is not None else 0
    num_texts = plan.batch_size - num_samples
    for batch in batches(lesson.text, plan.window_tokens, num_texts, plan.seed, num_batches * num_texts):
        if samples is None or not num_samples:
            yield batch
            continue
        rows = [(num_batches * num_samples + i) % len(samples) for i in range(num_samples)]
        yield torch.cat((batch, torch.from_numpy(samples[rows].astype(np.int64))))
        num_batches += 1
