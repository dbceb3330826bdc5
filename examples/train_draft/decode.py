"""Plain decoding by the coupled rule: with what the target writes on its own, drafts are taught and judged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from specdec.sampling.noise import gumbel


def scores(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """What the coupled rule takes the greatest of: log probabilities at a temperature plus noise; at 0 the logits."""
    return logits if temperature == 0 else functional.log_softmax(logits / temperature, -1) + noise


@torch.no_grad()
def generate(
    target: PreTrainedModel, prompts: Tensor, seeds: Sequence[int], num_tokens: int, temperature: float
) -> Tensor:
    """Continues prompts; the end-of-text token is a token like others.

    Args:
        target: The model.
        prompts: int64 [B, P].
        seeds: Of the shared noise, B of them.
        num_tokens: Tokens to add, N.
        temperature: 0 takes the likeliest token.

    Returns:
        Prompts and what follows them, int64 [B, P + N].
    """
    rows, cache = prompts, None
    for _ in range(num_tokens):
        output = target(rows if cache is None else rows[:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[:, -1].float()
        noise = gumbel(seeds, [rows.shape[1]] * len(rows), logits.shape[-1], rows.device)
        rows = torch.cat((rows, scores(logits, noise, temperature).argmax(-1, keepdim=True)), 1)
    return rows
