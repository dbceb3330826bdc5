"""Tokens that a request forbids: all but some, and those that would complete a bad word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdec.core.params import SamplingParams
from specdec.core.tokens import as_list
from specdec.core.types import Tokens
from specdec.sampling.kept import WhileAlive
from specdec.sampling.rows import RowGroup, Rows


class AllowedTokens:
    """Keeps all but the tokens that ``allowed_token_ids`` names from being chosen.

    A live request's mask is kept, a byte per token of the vocabulary: a list may be as long as that.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kept = WhileAlive[SamplingParams, Tensor]()

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Forbid what is not allowed, in all rows of a sequence.

        Args:
            logits: float32 [N, V], changed in place.
            rows: The layout of the N rows.
        """
        chosen = rows.using(lambda params: params.allowed_token_ids)
        if not chosen:
            return
        part, device = rows.part(chosen), logits.device
        masks = torch.stack([self._forbidden(group.spec.sampling, device) for group in part.groups])
        of_row = torch.tensor(part.spread(range(len(part.groups))), device=device)
        numbers = torch.tensor(rows.numbers(chosen), device=device)
        logits[numbers] = logits[numbers].masked_fill_(masks[of_row], -torch.inf)

    def _forbidden(self, params: SamplingParams, device: torch.device) -> Tensor:
        """Bool [V]: the tokens that a list does not name."""
        kept = self._kept.get(params)
        if kept is None or kept.device != device:
            mask = torch.ones(self._vocab_size, dtype=torch.bool)
            mask[torch.tensor(params.allowed_token_ids)] = False
            kept = self._kept.put(params, mask.to(device))
        return kept


def apply_bad_words(logits: Tensor, rows: Rows) -> None:
    """Forbid each token that would complete a bad word in the output, draft tokens before the row included.

    A row of which nothing would be left is left as it is: something must be chosen.

    Args:
        logits: float32 [N, V], changed in place.
        rows: The layout of the N rows.
    """
    banned = [
        (rows.starts[i] + offset, token)
        for i in rows.using(lambda params: params.bad_words)
        for offset, token in _completing(rows.groups[i])
        if token < logits.shape[1]
    ]
    if not banned:
        return
    place = tuple(torch.tensor(banned, device=logits.device).T)
    numbers = torch.tensor(sorted({row for row, _ in banned}), device=logits.device)
    before = logits[numbers]
    logits[place] = -torch.inf
    after = logits[numbers]
    logits[numbers] = torch.where(after.amax(1, keepdim=True) > -torch.inf, after, before)


def _completing(group: RowGroup) -> Iterator[tuple[int, int]]:
    """For each row of a group, by its number in it, the tokens that would complete a bad word there."""
    words = group.spec.sampling.bad_words
    longest = max(map(len, words)) - 1
    start = max(group.spec.output_start, len(group.tokens) - longest)
    output = (*as_list(group.tokens[start:]), *group.draft)
    num_before = len(output) - len(group.draft)
    for offset in range(1 + len(group.draft)):
        end = num_before + offset
        for word in words:
            if _ends_with(output, end, word[:-1]):
                yield offset, word[-1]


def _ends_with(tokens: Sequence[int], end: int, prefix: Tokens) -> bool:
    """Whether ``tokens[:end]`` ends with a word's first tokens."""
    if not prefix:
        return True
    return len(prefix) <= end and tokens[end - 1] == prefix[-1] and tuple(tokens[end - len(prefix) : end]) == prefix
