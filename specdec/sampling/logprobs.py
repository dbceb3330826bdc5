"""Log probabilities to report: the model's own, before any processing (the default of OpenAI and vLLM)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.protocol.messages import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log probability and rank of one token per row, and the row's most likely tokens.

    Sums are float64: a token that is not certain has a log probability below 0.0, however likely it is.

    Args:
        logits: float32 [M, V], as the model gave them.
        tokens: The tokens that stand at the rows' positions, M of them.
        num_top: How many of the most likely tokens to list for each row, M of them; ties by lower id are not promised.

    Returns:
        One entry per row.
    """
    if not tokens:
        return []
    device = logits.device
    chosen = logits.gather(1, torch.tensor(tokens, device=device).unsqueeze(1))
    total = logits.double().logsumexp(1, keepdim=True)
    rank = (logits > chosen).sum(1) + 1
    top_values, top_ids = logits.topk(min(max(num_top), logits.shape[1]), dim=1)
    # One transfer; float64 holds every id and rank.
    numbers = torch.cat((chosen - total, rank.unsqueeze(1), top_values - total, top_ids), 1).tolist()
    most = top_ids.shape[1]
    return [
        TokenLogprobs(
            logprob=row[0],
            rank=int(row[1]),
            top=tuple((int(i), value) for i, value in zip(row[2 + most :][:num], row[2 : 2 + most], strict=False)),
        )
        for row, num in zip(numbers, num_top, strict=True)
    ]
