"""The paged cache read by torch's variable-length flash attention: one call for all rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from specdec.models.plan import StepPlan, rectangle


@dataclass(frozen=True, slots=True)
class VarlenTables:
    """What the kernel wants to know of a step; int32 unless said otherwise, all on one device.

    Attributes:
        query_starts: [rows + 1], running sum of new tokens.
        key_starts: [rows + 1], running sum of the keys read.
        key_slots: int64 [sum of keys], slots of the keys of all rows in order.
        key_lengths: [rows], keys of each row from its position 0.
        block_table: [rows, most blocks of a row].
        max_num_queries: Longest row of new tokens.
        max_num_keys: Longest row of keys read.
        max_length: Longest row of keys from position 0.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    key_slots: torch.Tensor
    key_lengths: torch.Tensor
    block_table: torch.Tensor
    max_num_queries: int
    max_num_keys: int
    max_length: int


def attend_varlen(
    queries: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: StepPlan,
    scaling: float,
    window: int | None,
    *,
    paged: bool,
) -> torch.Tensor:
    """Attention of all rows in one call; a row's queries align with the end of its keys.

    Args:
        queries: [N, H, D], the plan's tokens, without padding.
        key_pool: [blocks, block size, H_kv, D].
        value_pool: [blocks, block size, H_kv, D].
        plan: The step.
        scaling: Factor of the scores.
        window: Positions read, the query's own among them; None reads all.
        paged: The kernel reads the block table itself (flash attention 3), else keys are gathered for it.

    Returns:
        [N, H, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    tables = plan.memo(("varlen", window, queries.device), lambda: make_tables(plan, window, queries.device))
    # The kernel's left bound counts the positions before the query's own.
    options: dict[str, Any] = {
        "scale": scaling,
        "window_size": (-1 if window is None else window - 1, 0),
        "enable_gqa": queries.shape[1] != key_pool.shape[2],
    }
    keys, values = key_pool, value_pool
    if paged:
        options |= {"seqused_k": tables.key_lengths, "block_table": tables.block_table}
    else:
        keys, values = (pool.flatten(0, 1).index_select(0, tables.key_slots) for pool in (key_pool, value_pool))
    output = varlen_attn(
        queries,
        keys,
        values,
        tables.query_starts,
        None if paged else tables.key_starts,
        tables.max_num_queries,
        tables.max_length if paged else tables.max_num_keys,
        **options,
    )
    assert isinstance(output, torch.Tensor)
    return output


def make_tables(plan: StepPlan, window: int | None, device: torch.device) -> VarlenTables:
    """A step's tables for layers that read the last ``window`` positions (None: all)."""
    assert not plan.has_padding, "the kernel knows no padding"
    spans = [plan.key_span(row, window) for row in plan.rows]
    num_keys = [span.row.length - span.first for span in spans]
    num_queries = [row.num_new_tokens for row in plan.rows]
    bounds = torch.tensor([[span.base, span.first, span.row.length] for span in spans])
    blocks = torch.tensor(rectangle([span.blocks for span in spans]))
    slots = (blocks.unsqueeze(2) * plan.block_size + torch.arange(plan.block_size)).flatten(1)
    positions = bounds[:, :1] + torch.arange(slots.shape[1])
    key_slots = slots[(positions >= bounds[:, 1:2]) & (positions < bounds[:, 2:])]

    def int32(values: Sequence[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return VarlenTables(
        query_starts=int32([0, *accumulate(num_queries)]),
        key_starts=int32([0, *accumulate(num_keys)]),
        key_slots=key_slots.to(device),
        key_lengths=int32([row.length for row in plan.rows]),
        block_table=int32(rectangle([list(row.block_ids) for row in plan.rows])),
        max_num_queries=max(num_queries),
        max_num_keys=max(num_keys),
        max_length=max(row.length for row in plan.rows),
    )
