"""Parameters that change single logits: penalties, biases, and the ban on ending early. All edit in place.

Each touches a few tokens of a row, so each is one gather and one scatter over the batch, whatever the vocabulary.

Tokens that a request forbids: all but some, and those that would complete a bad word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.params import SamplingParams
from specdec.core.tokens import as_list
from specdec.sampling.kept import WhileAlive
from specdec.sampling.rows import RowGroup, Rows, on_device
from specdec.sampling.token_counts import TokenCounts


def uses_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def apply_penalties(logits: Tensor, rows: Rows, token_counts: TokenCounts) -> None:
    """Repetition, presence and frequency penalties; each row counts the draft tokens before it.

    Repetition (Keskar et al. 2019, CTRL, section 4.1; as in transformers and vLLM) counts prompt and output: positive
    logits are divided by it, negative ones multiplied. Presence and frequency (OpenAI, vLLM) count the output alone:
    ``logit -= frequency * count + presence * (count > 0)``.

    Args:
        logits: float32 [N, V], changed in place.
        rows: The layout of the N rows.
        token_counts: Where the counts of earlier steps are kept.
    """
    chosen = rows.using(uses_penalties)
    if not chosen:
        return
    part, device = rows.part(chosen), logits.device
    counted = [token_counts.counted(group, logits.shape[1]) for group in part.groups]
    fill = [one.undrafted for one in counted]
    params = [group.spec.sampling for group in part.groups]
    ids, count, seen, strength, places_of, of_row, is_before, numbers = on_device(
        device,
        _padded([one.ids for one in counted], fill),
        _padded([one.counts for one in counted], fill),
        _padded([one.seen for one in counted], fill),
        np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], dtype=np.float32),
        _padded([np.array(one.places or [-1]) for one in counted], [0] * len(counted)),
        part.spread(np.arange(len(counted))),
        _before(part),
        rows.numbers(chosen),
    )
    factor, reduction = (each.index_select(0, of_row) for each in _penalties(count, seen, strength))
    # Only where a draft token stands does a row differ from the group's first one.
    drafted = places_of[of_row]
    places = drafted.clamp(min=0)
    before = _drafted_before(drafted, places, is_before)
    at = (of_row.unsqueeze(1), places)
    own_factor, own_reduction = _penalties(count[at] + before, seen[at] | (before > 0), strength[of_row])
    factor.scatter_(1, places, own_factor)
    reduction.scatter_(1, places, own_reduction)
    flat, where = logits.view(-1), ids.index_select(0, of_row) + numbers.unsqueeze(1) * logits.shape[1]
    old = flat.take(where)
    # One of the two terms is 0: faster than a choice, and as exact.
    new = (old.clamp(min=0) / factor).add_(old.clamp_(max=0).mul_(factor)).sub_(reduction)
    flat.put_(where, new)


def _penalties(count: Tensor, seen: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """What logits are divided or multiplied by, and what is subtracted then: float32 [G, U] each.

    Args:
        count: float32 [G, U], occurrences in the output.
        seen: bool [G, U], whether there are any, or any in the prompt.
        strength: float32 [G, 3]: repetition, frequency and presence penalty.
    """
    repetition, frequency, presence = strength[:, :1], strength[:, 1:2], strength[:, 2:]
    return torch.where(seen, repetition, 1.0), (frequency * count).add_(presence * (count > 0))


def _before(rows: Rows) -> NDArray[np.bool_]:
    """Which of its draft's tokens each row follows: [N, K], where K is at least 1."""
    is_before = np.zeros((rows.num_rows, max(1, max(rows.counts) - 1)), np.bool_)
    for group, start in zip(rows.groups, rows.starts, strict=True):
        for row in range(1, 1 + len(group.draft)):
            is_before[start + row, group.path(row)] = True
    return is_before


def _drafted_before(drafted: Tensor, places: Tensor, is_before: Tensor) -> Tensor:
    """How often each of ``places`` int64 [N, K] is among those of ``drafted`` [N, K] that ``is_before``: [N, K]."""
    return ((places.unsqueeze(2) == drafted.unsqueeze(1)) & is_before.unsqueeze(1)).sum(2)


def _padded(lists: Sequence[NDArray[Any]], fill: Sequence[int]) -> NDArray[Any]:
    """[G, longest] of the arrays' type, none of which is empty; filled by repeating one entry of each."""
    padded = np.empty((len(lists), max(map(len, lists))), dtype=lists[0].dtype)
    for row, values, entry in zip(padded, lists, fill, strict=True):
        row[: len(values)] = values
        row[len(values) :] = values[entry]
    return padded


class LogitBias:
    """Adds each sequence's biases to all of its rows. A live request's arrays are made once, not in every step."""

    def __init__(self) -> None:
        self._kept = WhileAlive[SamplingParams, tuple[NDArray[np.int64], NDArray[np.float32]]]()

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Add the biases.

        Args:
            logits: float32 [N, V], changed in place.
            rows: The layout of the N rows.
        """
        chosen = rows.using(lambda params: params.logit_bias)
        if not chosen:
            return
        part = rows.part(chosen)
        arrays = [self._arrays(group.spec.sampling) for group in part.groups]
        fill = [0] * len(arrays)
        ids, biases, numbers = on_device(
            logits.device,
            part.spread(_padded([ids for ids, _ in arrays], fill)),
            part.spread(_padded([biases for _, biases in arrays], fill)),
            rows.numbers(chosen),
        )
        logits[numbers.unsqueeze(1), ids] += biases

    def _arrays(self, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ids that a request biases, and by how much."""
        kept = self._kept.get(params)
        if kept is None:
            ids, biases = zip(*params.logit_bias, strict=True)
            kept = self._kept.put(params, (np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float32)))
        return kept


def apply_min_tokens(logits: Tensor, rows: Rows) -> None:
    """Forbid the ending tokens in rows with fewer than ``min_tokens`` output tokens before them, drafts included.

    Where every token of the vocabulary ends the sequence, none is forbidden: a row must leave something to choose.

    Args:
        logits: float32 [N, V], changed in place.
        rows: The layout of the N rows.
    """
    banned_rows: list[list[int]] = []
    banned: list[NDArray[np.int64]] = []
    for i in rows.using(lambda params: params.min_tokens > 0):
        group, start = rows.groups[i], rows.starts[i]
        num_missing = group.spec.sampling.min_tokens - group.num_output_tokens
        if num_missing <= 0:
            continue
        ending = [token for token in group.spec.ending_token_ids if 0 <= token < logits.shape[1]]
        if 0 < len(ending) < logits.shape[1]:
            banned_rows.append([start + row for row, depth in enumerate(group.depths) if depth < num_missing])
            banned.append(np.array(ending))
    if banned:
        at_row, tokens = on_device(
            logits.device,
            np.concatenate(banned_rows),
            np.repeat(_padded(banned, [0] * len(banned)), [len(numbers) for numbers in banned_rows], axis=0),
        )
        logits[at_row.unsqueeze(1), tokens] = -torch.inf


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
        of_row, numbers = on_device(device, part.spread(np.arange(len(part.groups))), rows.numbers(chosen))
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
    banned_rows, tokens = np.array(banned).T
    at_row, at_token, numbers = on_device(logits.device, banned_rows, tokens, np.unique(banned_rows))
    before = logits[numbers]
    logits[at_row, at_token] = -torch.inf
    after = logits[numbers]
    logits[numbers] = torch.where(after.amax(1, keepdim=True) > -torch.inf, after, before)


def _completing(group: RowGroup) -> Iterator[tuple[int, int]]:
    """For each row of a group, by its number in it, the tokens that would complete a bad word there."""
    words = group.spec.sampling.bad_words
    longest = max(map(len, words)) - 1
    start = max(group.spec.output_start, len(group.tokens) - longest)
    before = as_list(group.tokens[start:])
    for row in range(1 + len(group.draft)):
        output = before + [group.draft[i] for i in group.path(row)]
        for *prefix, last in words:
            if output[len(output) - len(prefix) :] == prefix:
                yield row, last
