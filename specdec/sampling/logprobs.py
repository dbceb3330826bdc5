"""Log probabilities to report: of a model's own logits (the default of OpenAI and vLLM), or of what became of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.types import TokenLogprobs

_MAX_SLICE_BYTES = 64 << 20
_BYTES_PER_DOUBLE = 8
_LEAST_DOUBLE = 2.0**-1074


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], num_top: Sequence[int], rows: Sequence[int] | None = None
) -> list[TokenLogprobs]:
    """Log probability and rank of one token per row, and the row's most likely tokens.

    A token that is not certain has a log probability below 0.0, however likely it is. Rows are taken in slices of at
    most 64 MiB of float64 (or one row).

    Args:
        logits: float32 [at least M, V], as the model gave them, or as a token is drawn from them: -inf is left out.
        tokens: The tokens that stand at the rows' positions, M of them.
        num_top: How many of the most likely tokens to list for each row, M of them; ties by lower id are not promised.
        rows: Numbers of the rows, M of them; by default the first M.

    Returns:
        One entry per row.
    """
    size = max(1, _MAX_SLICE_BYTES // (_BYTES_PER_DOUBLE * logits.shape[1]))
    entries: list[TokenLogprobs] = []
    for start in range(0, len(tokens), size):
        part = slice(start, min(start + size, len(tokens)))
        chosen = torch.tensor(tokens[part], dtype=torch.int64, device=logits.device)
        of_token = part if rows is None else torch.tensor(rows[part], dtype=torch.int64, device=logits.device)
        numbers = _slice_numbers(logits[of_token], chosen, max(num_top[part]))
        entries += entries_of(numbers.tolist(), num_top[part])
    return entries


def logprob_numbers(logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """The numbers of entries, slice by slice; nothing is waited for.

    Args:
        logits: float32 [N, V].
        rows: int64 [M], of each token.
        tokens: int64 [M].
        num_top: How many of the most likely tokens to list.

    Returns:
        float64 [M, 2 + 2 * C], where C is ``num_top``, but at least 2, and at most V: log probability and rank of the
        token, log probabilities and ids of the most likely ones. float64 holds every id and rank.
    """
    size = max(1, _MAX_SLICE_BYTES // (_BYTES_PER_DOUBLE * logits.shape[1]))
    parts = (slice(start, start + size) for start in range(0, len(tokens), size))
    return torch.cat([_slice_numbers(logits.index_select(0, rows[part]), tokens[part], num_top) for part in parts])


def _slice_numbers(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    chosen = logits.gather(1, tokens.unsqueeze(1))
    rank = (logits > chosen).sum(1, keepdim=True) + 1
    # At least two, where there are two: the second tells whether the first is certain.
    top_values, top_ids = logits.topk(min(max(2, num_top), logits.shape[1]), dim=1)
    best = top_values[:, :1].double()
    above_best = _total_above_best(logits, top_values, top_ids)
    logprobs, top = ((values - best) - above_best for values in (chosen, top_values))
    return torch.cat((logprobs, rank, top, top_ids), 1)


def entries_of(numbers: Sequence[Sequence[float]], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Entries of M rows of numbers, each with as many of the most likely tokens as are wanted."""
    most = len(numbers[0]) // 2 - 1 if numbers else 0
    return [
        TokenLogprobs(
            logprob=row[0],
            rank=int(row[1]),
            top=tuple(
                (int(i), value)
                for i, value in zip(row[2 + most :][:num], row[2 : 2 + most], strict=False)
                if value > -math.inf
            ),
        )
        for row, num in zip(numbers, num_top, strict=True)
    ]


def _total_above_best(logits: Tensor, top_values: Tensor, top_ids: Tensor) -> Tensor:
    """A row's log sum exp, less its largest logit: float64 [M, 1].

    It is log1p of what the other tokens weigh relative to the most likely one, which would be lost beside a 1. Above 0
    wherever another token is possible, even where a float64 cannot hold that.
    """
    weights = logits.double().sub_(top_values[:, :1]).exp_().scatter_(1, top_ids[:, :1], 0.0)
    above = weights.sum(1, keepdim=True).log1p_()
    if logits.shape[1] == 1:
        return above
    return above.masked_fill_((above <= 0) & (top_values[:, 1:2] != -torch.inf), _LEAST_DOUBLE)
