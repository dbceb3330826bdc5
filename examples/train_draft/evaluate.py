"""The pair's figures: held-out losses, acceptance under the coupled rule, how well the corrected token is guessed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.train_draft import models
from examples.train_draft.decode import generate, scores
from examples.train_draft.tokens import batches
from specdec.sampling.noise import gumbel

NUM_GUESSES = (3, 5)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is looked at."""

    num_windows: int = 32
    window_tokens: int = 512
    first_position: int = 64
    """Positions before this one have little context and are not counted in acceptance."""
    num_prompt_tokens: int = 128
    num_generated_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    seed: int = 20


@dataclass(frozen=True, slots=True)
class Agreement:
    """How draft and target agree at one temperature, position by position."""

    text: str
    """``held-out``: contexts from held-out files; ``own``: contexts written by the target at this temperature."""
    temperature: float
    num_positions: int
    acceptance: float
    """Share of positions where both models, with the same noise, choose the same token."""
    best_possible: float
    """Mean of 1 - TV: what no rule can exceed."""
    guessed: dict[int, float]
    """By n: share of the refused positions whose corrected token is among the draft's next n candidates."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What is said of a pair. Losses in nats per token; times of one cached decoding step of one sequence."""

    target_parameters: int
    draft_parameters: int
    target_loss: float
    draft_loss: float
    target_step_s: float
    draft_step_s: float
    weights_bytes: int
    agreements: tuple[Agreement, ...]


@torch.inference_mode()
def evaluate(target_folder: Path, draft_folder: Path, text: np.ndarray, extent: Extent, device: str = "cpu") -> Figures:
    """The figures of an exported pair, computed in float32 as the service does on a CPU.

    Args:
        target_folder: Of the target, as transformers loads it.
        draft_folder: Of the draft.
        text: Held-out tokens, uint16 [num_tokens].
        extent: How much is looked at.
        device: Where the models run.

    Returns:
        The figures.
    """
    target, draft = _load(target_folder, device), _load(draft_folder, device)
    windows = next(batches(text, extent.window_tokens, extent.num_windows, extent.seed)).to(device)
    agreements = [_on_text(target, draft, windows, extent, temperature) for temperature in extent.temperatures]
    for temperature in extent.temperatures:
        prompts, seeds = windows[:, : extent.num_prompt_tokens], _seeds(len(windows), extent)
        written = generate(target, prompts, seeds, extent.num_generated_tokens, temperature)
        own = Extent(extent.num_windows, written.shape[1] - 1, extent.num_prompt_tokens - 1, seed=extent.seed)
        agreements.append(_on_text(target, draft, written, own, temperature, "own"))
    return Figures(
        target_parameters=models.num_parameters(target),
        draft_parameters=models.num_parameters(draft),
        target_loss=_loss(target, windows),
        draft_loss=_loss(draft, windows),
        target_step_s=step_time(target),
        draft_step_s=step_time(draft),
        weights_bytes=sum(f.stat().st_size for d in (target_folder, draft_folder) for f in d.glob("*.safetensors")),
        agreements=tuple(agreements),
    )


def agreement(target_logits: Tensor, draft_logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Compares the models at N positions.

    Args:
        target_logits: float32 [N, vocab].
        draft_logits: float32 [N, vocab].
        noise: float32 [N, vocab], Gumbel noise that both share.
        temperature: At 0 the noise is not used.

    Returns:
        The rank that the target's token has among the draft's candidates (0: accepted), int64 [N]; 1 - TV of the two
        distributions, float32 [N].
    """
    target_tokens = scores(target_logits, noise, temperature).argmax(-1, keepdim=True)
    draft_scores = scores(draft_logits, noise, temperature)
    # The draft's own choice counts as rank 0 also where scores tie: argmax says which one it takes.
    ranks = (draft_scores > draft_scores.gather(-1, target_tokens)).sum(-1)
    if temperature == 0:
        return ranks, (ranks == 0).float()
    target_probs, draft_probs = (functional.softmax(x / temperature, -1) for x in (target_logits, draft_logits))
    return ranks, torch.minimum(target_probs, draft_probs).sum(-1)


def step_time(model: PreTrainedModel, num_context_tokens: int = 128, num_steps: int = 40) -> float:
    """Median seconds of a decoding step of one sequence with a cached context."""
    rows = torch.zeros(1, num_context_tokens, dtype=torch.int64, device=model.device)
    cache = model(rows, use_cache=True).past_key_values
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        cache = model(rows[:, -1:], past_key_values=cache, use_cache=True).past_key_values
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(figures: Figures) -> str:
    """The acceptance figures as a Markdown table."""
    lines = [
        "| text | T | positions | coupled acceptance | best possible (1-TV) | corrected token in next 3 / 5 |",
        "|---|---|---|---|---|---|",
    ]
    for row in figures.agreements:
        guessed = " / ".join(f"{row.guessed[n]:.3f}" for n in NUM_GUESSES)
        cells = (
            row.text,
            row.temperature,
            row.num_positions,
            f"{row.acceptance:.3f}",
            f"{row.best_possible:.3f}",
            guessed,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _on_text(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    windows: Tensor,
    extent: Extent,
    temperature: float,
    text: str = "held-out",
) -> Agreement:
    """Agreement after every prefix of the windows, int64 [B, T + 1], from ``extent.first_position`` on."""
    ranks, overlaps = [], []
    for seed, row in zip(_seeds(len(windows), extent), windows, strict=True):
        of_target, of_draft = (_logits(m, row[None, :-1])[0, extent.first_position :] for m in (target, draft))
        # The logits after a prefix of i tokens choose the token at position i.
        positions = range(extent.first_position + 1, len(row))
        noise = gumbel([seed] * len(positions), positions, of_target.shape[-1], row.device)
        rank, overlap = agreement(of_target, of_draft, noise, temperature)
        ranks.append(rank)
        overlaps.append(overlap)
    rank, overlap = torch.cat(ranks), torch.cat(overlaps)
    refused = rank[rank > 0]
    return Agreement(
        text=text,
        temperature=temperature,
        num_positions=len(rank),
        acceptance=(rank == 0).float().mean().item(),
        best_possible=overlap.mean().item(),
        guessed={n: (refused <= n).float().mean().item() for n in NUM_GUESSES},
    )


def _logits(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    logits: Tensor = model(inputs, use_cache=False).logits
    return logits.float()


def _loss(model: PreTrainedModel, windows: Tensor) -> float:
    """Mean cross-entropy over all positions of the windows, in nats."""
    losses = [functional.cross_entropy(_logits(model, row[None, :-1])[0], row[1:]).item() for row in windows]
    return statistics.fmean(losses)


def _load(folder: Path, device: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().to(device)


def _seeds(num_rows: int, extent: Extent) -> list[int]:
    return [extent.seed * 1000 + i for i in range(num_rows)]
