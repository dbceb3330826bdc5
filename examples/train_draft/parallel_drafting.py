"""A draft that gives several tokens in one pass: it learns what the target says in the place of mask tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from examples.train_draft import checkpoints, loop, models
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.decode import generate, scores
from examples.train_draft.distill import divergence, log_probs
from examples.train_draft.evaluate import Extent
from examples.train_draft.loop import LossFunction, Plan
from examples.train_draft.optimizers import Rates
from examples.train_draft.tokens import batches
from specdec.sampling.noise import gumbel

LATER = 0.9
"""What each further place's loss counts for, of the one's before."""
_PADDING = 16
"""The vocabulary's width stays a multiple of it."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Which places learn: after each of ``num_anchors`` tokens of a window, ``num_masks`` mask tokens in a row.

    As An et al. 2025, "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation", section 3.2:
    mask tokens after an anchor see the text up to it and one another, and text after it sees none of them.
    """

    num_masks: int = 7
    num_anchors: int = 48

    def layout(self, window_tokens: int, offset: int) -> tuple[Tensor, Tensor]:
        """Anchors and what sees what.

        Args:
            window_tokens: T, tokens of a window.
            offset: Moves all anchors; any number.

        Returns:
            Positions of the anchors, int64 [num_anchors]; whether a row sees a column, bool [T + M, T + M] with
            M = num_anchors * num_masks.
        """
        stride = (window_tokens - self.num_masks) // self.num_anchors
        anchors = offset % stride + stride * torch.arange(self.num_anchors)
        size = window_tokens + self.num_anchors * self.num_masks
        sees = torch.zeros(size, size, dtype=torch.bool)
        sees[:window_tokens, :window_tokens] = torch.ones(window_tokens, window_tokens).tril().bool()
        of_anchor = anchors.repeat_interleave(self.num_masks)
        sees[window_tokens:, :window_tokens] = torch.arange(window_tokens) <= of_anchor[:, None]
        own = torch.ones(self.num_masks, self.num_masks).tril().bool()
        sees[window_tokens:, window_tokens:] = torch.block_diag(*[own] * self.num_anchors).bool()
        return anchors, sees


def with_mask_token(draft: PreTrainedModel) -> PreTrainedModel:
    """A draft with one token more, ``pard_token`` of its configuration, which begins as the mean of the others."""
    vocab_size = draft.config.vocab_size
    fields = draft.config.to_dict() | {"vocab_size": vocab_size + _PADDING, "pard_token": vocab_size}
    model = models.from_fields(fields)
    state = draft.state_dict()
    for name in [name for name, tensor in state.items() if len(tensor) == vocab_size]:
        state[name] = torch.cat((state[name], state[name].mean(0, keepdim=True).expand(_PADDING, -1)))
    model.load_state_dict(state)
    return model


def parallel_drafting_loss(draft: PreTrainedModel, target: PreTrainedModel, masks: Masks) -> LossFunction:
    """Forward KL from what the target says at each place, knowing all before it, to what the draft says there.

    Places of the text itself count as one place after an anchor does, so that the draft stays one of single steps.
    """

    def loss_of(windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        num_rows, length = inputs.shape
        anchors, sees = masks.layout(length, int(windows.sum()))
        with torch.no_grad():
            of_target = log_probs(target, inputs).unflatten(0, (num_rows, length))
        logits = packed_logits(draft, inputs, anchors, sees, masks.num_masks)
        of_draft = functional.log_softmax(logits[..., : target.config.vocab_size].float(), -1)
        loss = divergence(of_draft[:, :length].flatten(0, 1), of_target.flatten(0, 1), 0.0)
        of_masks = of_draft[:, length:].unflatten(1, (masks.num_anchors, masks.num_masks))
        for i in range(masks.num_masks):
            of_place = of_target[:, anchors + 1 + i].flatten(0, 1)
            loss = loss + LATER**i * divergence(of_masks[:, :, i].flatten(0, 1), of_place, 0.0)
        return loss[None]

    return loss_of


def packed_logits(draft: PreTrainedModel, inputs: Tensor, anchors: Tensor, sees: Tensor, num_masks: int) -> Tensor:
    """Logits, float32 [B, T + M, V]; see :func:`packed_states`."""
    logits: Tensor = draft.lm_head(packed_states(draft, inputs, anchors, sees, num_masks))
    return logits


def packed_states(draft: PreTrainedModel, inputs: Tensor, anchors: Tensor, sees: Tensor, num_masks: int) -> Tensor:
    """States of a window's tokens, then of the masks of each anchor: [B, T + M, hidden size] for ``inputs`` [B, T].

    ``anchors`` and ``sees`` are those of :meth:`Masks.layout`.
    """
    num_rows, length = inputs.shape
    places = (anchors[:, None] + torch.arange(1, 1 + num_masks)).flatten()
    states: Tensor = draft.model(
        torch.cat((inputs, inputs.new_full((num_rows, len(places)), draft.config.pard_token)), 1),
        attention_mask=sees.expand(num_rows, 1, -1, -1),
        position_ids=torch.cat((torch.arange(length), places)).expand(num_rows, -1),
        use_cache=False,
    ).last_hidden_state
    return states


def train_parallel_drafting(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    text: np.ndarray,
    masks: Masks,
    plan: Plan,
    rates: Rates,
    path: Path,
) -> Checkpoint:
    """Trains, or goes on training, the draft at ``path``.

    Args:
        target: Gives the distributions.
        draft: Where the training starts: a draft of single steps.
        text: Training tokens, uint16 [num_tokens].
        masks: Which places learn.
        plan: How long, and how steps are made.
        rates: Learning rates.
        path: The checkpoint's file.
    """
    target.eval().requires_grad_(False)
    checkpoint = checkpoints.load(path) if path.exists() else Checkpoint(with_mask_token(draft), {}, 0, 0, 0.0)
    source = batches(text, plan.window_tokens, plan.batch_size, plan.seed, checkpoint.step * plan.batch_size)
    loop.train(
        [loop.Student(checkpoint, rates, path)], source, plan, parallel_drafting_loss(checkpoint.model, target, masks)
    )
    return checkpoint


@dataclass(frozen=True, slots=True)
class Kept:
    """How much of passes is the target's.

    Attributes:
        shares: How often the first, second, ... token and all before it are, after each token of a text.
        tokens_a_round: Tokens of a pass, the target's own included, where each begins after what the one before gave.
            That is less than the shares add up to: where little is kept, more passes begin.
    """

    shares: list[float]
    tokens_a_round: float


@torch.inference_mode()
def acceptance(
    draft: PreTrainedModel, target: PreTrainedModel, text: np.ndarray, masks: Masks, extent: Extent
) -> dict[float, Kept]:
    """What is kept of passes, by temperature, in text that the target wrote; both models draw with the same noise."""
    target.eval()
    draft.eval()
    windows = next(batches(text, extent.window_tokens, extent.num_windows, extent.seed))
    prompts, seeds = windows[:, : extent.num_prompt_tokens], [extent.seed * 1000 + i for i in range(len(windows))]
    kept: dict[float, Kept] = {}
    for temperature in (0.0, 1.0):
        written = generate(target, prompts, seeds, extent.num_generated_tokens, temperature)
        matches = [
            _matches(draft, target, row, seed, masks, extent, temperature)
            for row, seed in zip(written, seeds, strict=True)
        ]
        kept[temperature] = kept_of([of_row.long().cumprod(1) for of_row in matches])
    return kept


def kept_of(texts: list[Tensor]) -> Kept:
    """What is kept of passes, from whether each of their tokens and all before it are: int64 [A, N] for each text."""
    num_tokens = num_rounds = 0
    for counts in (of_text.sum(1).tolist() for of_text in texts):
        place = 0
        while place < len(counts):
            place += 1 + counts[place]
            num_rounds += 1
        num_tokens += place
    return Kept(torch.cat(texts).float().mean(0).tolist(), num_tokens / num_rounds)


def _matches(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    row: Tensor,
    seed: int,
    masks: Masks,
    extent: Extent,
    temperature: float,
) -> Tensor:
    """Whether each token of a pass after each anchor is the target's: bool [num_anchors, 1 + num_masks]."""
    vocab_size = target.config.vocab_size
    noise = gumbel([seed] * len(row), range(1, len(row) + 1), vocab_size, row.device)
    chosen = scores(target(row[None], use_cache=False).logits[0].float(), noise, temperature).argmax(-1)
    found = []
    for anchor in range(extent.num_prompt_tokens, len(row) - masks.num_masks):
        tokens = torch.cat((row[: anchor + 1], row.new_full((masks.num_masks,), draft.config.pard_token)))
        logits = draft(tokens[None], use_cache=False).logits[0, anchor:, :vocab_size].float()
        places = slice(anchor, anchor + 1 + masks.num_masks)
        found.append(scores(logits, noise[places], temperature).argmax(-1) == chosen[places])
    return torch.stack(found)
