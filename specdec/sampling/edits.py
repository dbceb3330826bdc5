"""Parameters that change single logits: penalties, biases, and the ban on ending early. All edit in place.

Each touches a few tokens of a row, so each is one gather and one scatter over the batch, whatever the vocabulary.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import chain, product, repeat

import torch
from torch import Tensor

from specdec.sampling.params import SamplingParams
from specdec.sampling.rows import RowGroup, Rows


def uses_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def apply_penalties(logits: Tensor, rows: Rows) -> None:
    """Repetition, presence and frequency penalties; row i of a group counts the group's first i draft tokens.

    Repetition (Keskar et al. 2019, CTRL, section 4.1; as in transformers and vLLM) counts prompt and output: positive
    logits are divided by it, negative ones multiplied. Presence and frequency (OpenAI, vLLM) count the output alone:
    ``logit -= frequency * count + presence * (count > 0)``.

    Args:
        logits: float32 [N, V], changed in place.
        rows: The layout of the N rows.
    """
    chosen = rows.using(uses_penalties)
    if not chosen:
        return
    groups = [rows.groups[i] for i in chosen]
    part, device = rows.part(chosen), logits.device
    prompts = [_prompt_ids(group) for group in groups]
    histories = [_history(group, prompt, logits.shape[1]) for group, prompt in zip(groups, prompts, strict=True)]
    ids = _padded([list(history) for history in histories], device)
    counts = _padded([list(history.values()) for history in histories], device)
    prompted = [[i in prompt for i in history] for history, prompt in zip(histories, prompts, strict=True)]
    in_prompt = _padded(prompted, device).bool()
    of_row = torch.tensor(part.spread(range(len(groups))), device=device)
    offset = torch.tensor(part.offsets(), device=device)
    count = counts[of_row] + _drafted_before(groups, ids)[of_row, offset]
    params = [group.spec.sampling for group in groups]
    repetition = _column(part.spread(p.repetition_penalty for p in params), device)
    frequency = _column(part.spread(p.frequency_penalty for p in params), device)
    presence = _column(part.spread(p.presence_penalty for p in params), device)
    place = (torch.tensor(rows.numbers(chosen), device=device).unsqueeze(1), ids[of_row])
    old = logits[place]
    seen = in_prompt[of_row] | (count > 0)
    new = torch.where(seen, torch.where(old > 0, old / repetition, old * repetition), old)
    logits[place] = new - frequency * count - presence * (count > 0)


def _prompt_ids(group: RowGroup) -> set[int]:
    """The prompt's tokens, where a penalty counts them."""
    return set(group.tokens[: group.spec.output_start]) if group.spec.sampling.repetition_penalty != 1 else set()


def _history(group: RowGroup, prompt: set[int], vocab_size: int) -> dict[int, int]:
    """Every token that a penalty may touch in the group's rows, with its count in the output before the first row."""
    history = dict.fromkeys(chain(prompt, group.draft), 0) | Counter(group.tokens[group.spec.output_start :])
    return {token: count for token, count in history.items() if 0 <= token < vocab_size} or {0: 0}


def _drafted_before(groups: Sequence[RowGroup], ids: Tensor) -> Tensor:
    """How often each of ``ids`` [G, U] stands among a row's first 0, 1, ... K draft tokens: int64 [G, 1 + K, U]."""
    longest = max(len(group.draft) for group in groups)
    drafts = torch.tensor([(-1, *group.draft) + (-1,) * (longest - len(group.draft)) for group in groups])
    return (drafts.to(ids.device).unsqueeze(2) == ids.unsqueeze(1)).cumsum(1)


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def _padded(lists: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [G, longest]; short lists repeat their first entry, so that a scatter writes the same value again."""
    longest = max(map(len, lists))
    flat = array("q")
    for values in lists:
        flat.extend(values)
        flat.extend(repeat(values[0], longest - len(values)))
    return torch.frombuffer(flat, dtype=torch.int64).view(len(lists), longest).to(device)


def apply_logit_bias(logits: Tensor, rows: Rows) -> None:
    """Add each sequence's biases to all of its rows.

    Args:
        logits: float32 [N, V], changed in place.
        rows: The layout of the N rows.
    """
    chosen = rows.using(lambda params: params.logit_bias)
    at_row: list[int] = []
    at_token: list[int] = []
    biases: list[float] = []
    for i in chosen:
        tokens, values = zip(*rows.groups[i].spec.sampling.logit_bias, strict=True)
        for row in rows.numbers([i]):
            at_row += [row] * len(tokens)
            at_token += tokens
            biases += values
    if chosen:
        place = (torch.tensor(at_row, device=logits.device), torch.tensor(at_token, device=logits.device))
        logits.index_put_(place, torch.tensor(biases, device=logits.device), accumulate=True)


def apply_min_tokens(logits: Tensor, rows: Rows) -> None:
    """Forbid the ending tokens in rows with fewer than ``min_tokens`` output tokens before them, drafts included.

    Args:
        logits: float32 [N, V], changed in place.
        rows: The layout of the N rows.
    """
    places: list[tuple[int, int]] = []
    for i in rows.using(lambda params: params.min_tokens > 0):
        group, start = rows.groups[i], rows.starts[i]
        num_banned = group.spec.sampling.min_tokens - group.num_output_tokens
        banned_rows = range(start, start + max(0, min(num_banned, rows.counts[i])))
        places += product(banned_rows, (token for token in group.spec.ending_token_ids if token < logits.shape[1]))
    if places:
        at_row, at_token = torch.tensor(places, device=logits.device).unbind(1)
        logits[at_row, at_token] = -torch.inf
