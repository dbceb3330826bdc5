"""The paged cache read by torch's variable-length flash attention: one call for many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from specdec.kernels.attention_metadata import RowSpan, StepPlan, max_group_numbers, padded_block_table


@dataclass(frozen=True, slots=True)
class VarlenTables:
    """What the kernel wants to know of some rows; int32 unless said otherwise, all on one device.

    Attributes:
        queries: Where the rows' new tokens lie among the step's.
        cu_seqlens_q: [rows + 1], running sum of new tokens.
        cu_seqlens_k: [rows + 1], running sum of the keys read.
        gathered_slots: int64 [sum of keys], slots of the keys of all rows in order.
        seqused_k: [rows], keys of each row from its position 0.
        block_table: [rows, most blocks of a row].
        max_seqlen_q: Longest row of new tokens.
        max_seqlen_k: Longest row of keys read.
        max_seqused_k: Longest row of keys from position 0.
    """

    queries: slice
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    gathered_slots: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    max_seqused_k: int


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
    """Attention of all rows; a row's queries align with the end of its keys.

    Where keys are gathered, a call serves no more rows than fit a bounded copy: rows that share a long prefix read the
    same few blocks, and their copies would be as large as if they shared nothing.

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

    most = None if paged else max_group_numbers(queries.device) // key_pool[0, 0].numel()
    kind = ("varlen", window, queries.device, most)
    pieces = plan.memo(kind, lambda: _pieces(plan, window, queries.device, most))
    # The kernel's left bound counts the positions before the query's own.
    options: dict[str, Any] = {
        "scale": scaling,
        "window_size": (-1 if window is None else window - 1, 0),
        "enable_gqa": queries.shape[1] != key_pool.shape[2],
    }
    outputs = []
    for tables in pieces:
        keys, values = key_pool, value_pool
        if paged:
            options |= {"seqused_k": tables.seqused_k, "block_table": tables.block_table}
        else:
            keys, values = (
                pool.flatten(0, 1).index_select(0, tables.gathered_slots) for pool in (key_pool, value_pool)
            )
        output = varlen_attn(
            queries[tables.queries],
            keys,
            values,
            tables.cu_seqlens_q,
            None if paged else tables.cu_seqlens_k,
            tables.max_seqlen_q,
            tables.max_seqused_k if paged else tables.max_seqlen_k,
            **options,
        )
        assert isinstance(output, torch.Tensor)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _pieces(plan: StepPlan, window: int | None, device: torch.device, max_keys: int | None) -> list[VarlenTables]:
    """Tables of consecutive rows that read at most ``max_keys`` keys together, or of one row that reads more."""
    assert not plan.has_padding, "the kernel knows no padding"
    pieces: list[list[RowSpan]] = []
    num_keys = 0
    for row in plan.rows:
        row_keys = row.length - plan.key_span(row, window).first
        num_keys += row_keys
        if not pieces or (max_keys is not None and num_keys > max_keys):
            pieces.append([])
            num_keys = row_keys
        pieces[-1].append(row)
    return [make_tables(plan, rows, window, device) for rows in pieces]


def make_tables(plan: StepPlan, rows: Sequence[RowSpan], window: int | None, device: torch.device) -> VarlenTables:
    """Tables of consecutive rows of a step, for layers that read the last ``window`` positions (None: all)."""
    spans = [plan.key_span(row, window) for row in rows]
    num_keys = [span.row.length - span.first for span in spans]
    num_queries = [row.num_new_tokens for row in rows]
    bounds = torch.tensor([[span.base, span.first, span.row.length] for span in spans])
    blocks = torch.tensor(padded_block_table([span.blocks for span in spans]))
    slots = (blocks.unsqueeze(2) * plan.block_size + torch.arange(plan.block_size)).flatten(1)
    positions = bounds[:, :1] + torch.arange(slots.shape[1])
    gathered_slots = slots[(positions >= bounds[:, 1:2]) & (positions < bounds[:, 2:])]

    def int32(values: Sequence[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return VarlenTables(
        queries=slice(rows[0].start, rows[-1].start + rows[-1].num_new_tokens),
        cu_seqlens_q=int32([0, *accumulate(num_queries)]),
        cu_seqlens_k=int32([0, *accumulate(num_keys)]),
        gathered_slots=gathered_slots.to(device),
        seqused_k=int32([row.length for row in rows]),
        block_table=int32(padded_block_table([list(row.block_ids) for row in rows])),
        max_seqlen_q=max(num_queries),
        max_seqlen_k=max(num_keys),
        max_seqused_k=max(row.length for row in rows),
    )
