"""top_k, top_p and min_p: each keeps the most likely tokens down to some logit, so one threshold per row does all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.core.params import SamplingParams

_NUM_CANDIDATES = 1024


def uses_truncation(params: SamplingParams) -> bool:
    """Whether any of the three is on."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def thresholds(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit each row keeps.

    As in transformers, in this order, each on what the one before has left, normalised anew (vLLM applies min_p first,
    so that top_k and top_p act on what that has left):

    - top_k keeps the k most likely tokens;
    - top_p (Holtzman et al. 2020, section 3.1) keeps the fewest most likely tokens whose probabilities reach it;
    - min_p (Nguyen et al. 2024, section 3) keeps tokens with at least that share of the most likely one's probability.

    Tokens that tie with the last one kept are kept too, so that the result depends on no order of sorting.

    Args:
        scaled: float32 [N, V], logits divided by the temperature, each row's maximum 0.
        params: One per row.

    Returns:
        float32 [N, 1]; -inf where a row keeps everything.
    """
    vocab_size, device = scaled.shape[1], scaled.device
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
    lowest = min_p.log().float().unsqueeze(1)
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    cut_k, cut_p = min(top_k) < vocab_size, any(p.top_p < 1 for p in params)
    if not cut_k and not cut_p:
        return lowest
    largest_cut = max((k for k in top_k if k < vocab_size), default=0)
    num_sorted = min(vocab_size, max(largest_cut, _NUM_CANDIDATES if cut_p else 0))
    # Sorting is what truncation costs, and a top_p seldom needs more than the first candidates.
    ordered = _largest(scaled, num_sorted)
    last_k = torch.tensor(top_k, device=device).unsqueeze(1)
    by_k = ordered.gather(1, last_k.clamp(max=num_sorted) - 1).masked_fill_(last_k == vocab_size, -torch.inf)
    if not cut_p:
        return torch.maximum(lowest, by_k)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    by_p, found = _nucleus(scaled, ordered, by_k, top_p)
    if not bool(found.all()):
        by_p, _ = _nucleus(scaled, _largest(scaled, vocab_size), by_k, top_p)
    return torch.maximum(lowest, torch.maximum(by_k, by_p))


def _nucleus(scaled: Tensor, ordered: Tensor, by_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest logit that top_p keeps, and whether the sorted logits given reach that far.

    Args:
        scaled: float32 [N, V].
        ordered: float32 [N, M], the M largest logits of each row, in descending order.
        by_k: float32 [N, 1], the smallest logit that top_k keeps.
        top_p: float64 [N, 1].

    Returns:
        float32 [N, 1], -inf for a top_p of 1; and bool [N, 1].
    """
    mass = scaled.exp().masked_fill_(scaled < by_k, 0).sum(1, keepdim=True, dtype=torch.float64)
    goal = top_p * mass
    reached = ordered.exp().cumsum(1, dtype=torch.float64)
    num_short = (reached < goal).sum(1, keepdim=True)
    last = num_short.clamp(max=ordered.shape[1] - 1)
    everything = top_p >= 1
    # Past the last candidate, what is missing of a row cut by top_k ties with that row's last one.
    found = (num_short < ordered.shape[1]) | everything | (ordered[:, -1:] <= by_k)
    return ordered.gather(1, last).masked_fill_(everything, -torch.inf), found


def _largest(values: Tensor, num: int) -> Tensor:
    """The ``num`` largest of each row of float32 [N, V], in descending order: [N, num].

    On a CPU numpy selects and sorts in vectors, torch does not.
    """
    if values.device.type != "cpu":
        return values.topk(num, dim=1).values
    array, num_rest = values.detach().numpy(), values.shape[1] - num
    if num_rest > 0:
        array = np.partition(array, num_rest, axis=1)[:, num_rest:]
    return torch.from_numpy(np.sort(array, axis=1)[:, ::-1].copy())
