"""Heads on a target: each learns the target's distributions for its position; the target itself is not changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.train_draft import checkpoints, loop, models
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.decode import generate, scores
from examples.train_draft.distill import divergence
from examples.train_draft.evaluate import Extent
from examples.train_draft.loop import LossFunction, Plan
from examples.train_draft.optimizers import Rates
from examples.train_draft.tokens import batches
from specdec.drafting.medusa.heads import HeadsConfig, MedusaHeads
from specdec.sampling.noise import gumbel

LATER = 0.8
"""What each further head's loss counts for, of the one's before: Cai et al. 2024, "Medusa", section 2.2.1."""


def heads_loss(heads: MedusaHeads, target: PreTrainedModel) -> LossFunction:
    """Forward KL from what the target says at each head's position, knowing all before it, to what the head says."""

    def loss_of(windows: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = target.model(windows, use_cache=False).last_hidden_state
            of_target = functional.log_softmax(target.lm_head(hidden).float(), -1)
        loss = hidden.new_zeros(())
        for ahead, states in enumerate(heads.states(hidden[:, : -heads.num_tokens]), start=1):
            of_head = functional.log_softmax(target.lm_head(states).float(), -1).flatten(0, 1)
            of_this = of_target[:, ahead : ahead + states.shape[1]].flatten(0, 1)
            loss = loss + LATER ** (ahead - 1) * divergence(of_head, of_this, 0.0)
        return loss[None]

    return loss_of


def train_heads(
    target: PreTrainedModel, text: np.ndarray, config: HeadsConfig, plan: Plan, rates: Rates, path: Path
) -> Checkpoint:
    """Trains, or goes on training, the heads at ``path``.

    Args:
        target: On which they are; its device is theirs.
        text: Training tokens, uint16 [num_tokens].
        config: The heads' shape; their vocabulary head is the target's own.
        plan: How long, and how steps are made.
        rates: Learning rates.
        path: The checkpoint's file.
    """
    target.eval().requires_grad_(False)
    device = str(target.device)
    if path.exists():
        checkpoint = checkpoints.load(path, device)
    else:
        checkpoint = Checkpoint(models.from_fields(config.to_dict()).to(device), {}, 0, 0, 0.0)
    source = batches(text, plan.window_tokens, plan.batch_size, plan.seed, checkpoint.step * plan.batch_size)
    loss_of = heads_loss(cast(MedusaHeads, checkpoint.model), target)
    loop.train([loop.Student(checkpoint, rates, path)], source, plan, loss_of)
    return checkpoint


def export_heads(model: PreTrainedModel, folder: Path) -> None:
    """Writes the heads in bfloat16, as :func:`specdec.drafting.medusa.heads.load` reads them."""
    heads = cast(MedusaHeads, model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in heads.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(heads.config.to_dict(), indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """How heads and target agree at one temperature."""

    text: str
    temperature: float
    num_positions: int
    per_head: list[float]
    """Share of positions where a head, with the same noise, chooses the target's token."""
    in_first: list[float]
    """Share where that is so for a head and all before it."""

    @property
    def tokens_a_round(self) -> float:
        """Accepted tokens and the one after them."""
        return 1 + sum(self.in_first)


@torch.inference_mode()
def evaluate_heads(
    model: PreTrainedModel, target_folder: Path, text: np.ndarray, extent: Extent, device: str = "cpu"
) -> list[HeadAcceptance]:
    """Acceptance per head on held-out text and on what the target writes itself; arguments as for ``evaluate``."""
    heads = cast(MedusaHeads, model)
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    target = target.eval().to(device)
    windows = next(batches(text, extent.window_tokens, extent.num_windows, extent.seed)).to(device)
    rows = [_acceptance(heads, target, windows, extent.first_position, extent, T, "held-out") for T in (0.0, 1.0)]
    for temperature in (0.0, 1.0):
        prompts, seeds = windows[:, : extent.num_prompt_tokens], [extent.seed * 1000 + i for i in range(len(windows))]
        written = generate(target, prompts, seeds, extent.num_generated_tokens, temperature)
        rows.append(_acceptance(heads, target, written, extent.num_prompt_tokens - 1, extent, temperature, "own"))
    return rows


def table(rows: list[HeadAcceptance]) -> str:
    """The figures as a Markdown table."""
    lines = ["| text | T | positions | per head | with all before it | tokens a round |", "|---|---|---|---|---|---|"]
    for row in rows:
        per_head, in_first = (" / ".join(f"{share:.3f}" for share in shares) for shares in (row.per_head, row.in_first))
        cells = (row.text, row.temperature, row.num_positions, per_head, in_first, f"{row.tokens_a_round:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _acceptance(
    heads: MedusaHeads,
    target: PreTrainedModel,
    windows: Tensor,
    first: int,
    extent: Extent,
    temperature: float,
    text: str,
) -> HeadAcceptance:
    matches = []
    for index, row in enumerate(windows):
        hidden = target.model(row[None], use_cache=False).last_hidden_state[0]
        seed = [extent.seed * 1000 + index] * len(row)
        noise = gumbel(seed, range(1, len(row) + 1), target.config.vocab_size, row.device)  # of each row's choice
        chosen = scores(target.lm_head(hidden).float(), noise, temperature).argmax(-1)
        kept = hidden[first : -heads.num_tokens]
        of_row = []
        for ahead, states in enumerate(heads.states(kept), start=1):
            at = slice(first + ahead, first + ahead + len(kept))
            guess = scores(target.lm_head(states).float(), noise[at], temperature).argmax(-1)
            of_row.append(guess == chosen[at])
        matches.append(torch.stack(of_row))
    all_matches = torch.cat(matches, 1).float()
    per_head, in_first = all_matches.mean(1), all_matches.cumprod(0).mean(1)
    return HeadAcceptance(text, temperature, all_matches.shape[1], per_head.tolist(), in_first.tolist())
