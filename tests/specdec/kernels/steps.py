"""Steps of attention to test by: rows of any lengths in shuffled blocks, with trees and padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.kernels.segmented import NO_TREE, AttentionShape, AttentionStep

SHAPE = AttentionShape(4, 2, 16, 16, torch.float32, 8, 40, 8, 400, segment_length=16)


@dataclass
class Case:
    """A step with what is in the cache."""

    shape: AttentionShape
    step: AttentionStep
    queries: Tensor
    keys: Tensor
    values: Tensor

    def rows(self, numbers: list[int]) -> Case:
        """Some tokens of the step, each as a row of its own."""
        at, step = torch.tensor(numbers), self.step
        part = replace(
            step,
            **{name: getattr(step, name)[at] for name in ("row", "place", "position", "tree_first", "tree_word")},
            span_row=step.row[at],
            span_start=torch.arange(len(at), dtype=torch.int32),
            span_count=torch.ones(len(at), dtype=torch.int32),
        )
        return replace(self, step=part, queries=self.queries[at])


def make_case(
    shape: AttentionShape,
    rows: list[tuple[int, int]],
    parents: dict[int, list[int]] | None = None,
    padding: int = 0,
    seed: int = 0,
) -> Case:
    """Rows of (positions before the step, tokens of the step).

    Args:
        shape: Of the model.
        rows: Of the step.
        parents: Of rows that end with a tree, what each of its tokens follows.
        padding: Tokens after the rows.
        seed: Of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [before + count for before, count in rows]
    width = -(-max(lengths) // shape.block_size)
    table = (torch.randperm(len(rows) * width, generator=generator) + 1).int().view(len(rows), width)
    row: list[int] = []
    place: list[int] = []
    position, first, word = [], [], []
    spans = []
    for i, (before, count) in enumerate(rows):
        tree = (parents or {}).get(i, [])
        spans.append((i, len(row), count))
        plain = count - len(tree)
        depth: list[int] = []
        words: list[int] = []
        for j, parent in enumerate(tree):
            depth.append(1 + (depth[parent] if parent >= 0 else 0))
            words.append((words[parent] if parent >= 0 else 0) | 1 << j)
        row += [i] * count
        place += range(before, before + count)
        position += [*range(before, before + plain), *(before + plain - 1 + d for d in depth)]
        first += [before + plain if tree else NO_TREE] * count
        word += [0] * plain + [w - (1 << 64) if w >> 63 else w for w in words]
    for values, fill in ((row, -1), (place, 0), (position, 0), (first, NO_TREE), (word, 0)):
        values += [fill] * padding
    spans += [(-1, 0, 0)] * 2

    def int32(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    step = AttentionStep(
        table, int32(row), int32(place), int32(position), int32(first), torch.tensor(word), *int32(spans).T.contiguous()
    )
    pools = [
        torch.randn(len(rows) * width + 1, shape.block_size, shape.num_kv_heads, dim, generator=generator)
        for dim in (shape.head_dim, shape.value_dim)
    ]
    queries = torch.randn(len(row), shape.num_heads, shape.head_dim, generator=generator)
    return Case(shape, step, queries.to(shape.dtype), *(pool.to(shape.dtype) for pool in pools))


def spread_step(
    tables: list[list[int]], starts: list[int], before: list[int], counts: list[int], num_tokens: int
) -> AttentionStep:
    """A step without trees; of each row its blocks, first token, positions before the step and tokens of the step."""
    width = max(map(len, tables))
    table = torch.tensor([one + [one[-1]] * (width - len(one)) for one in tables], dtype=torch.int32)
    row, place = torch.full((num_tokens,), -1, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int32)
    for i, (start, past, count) in enumerate(zip(starts, before, counts, strict=True)):
        row[start : start + count] = i
        place[start : start + count] = torch.arange(past, past + count)
    spans = torch.tensor([[*range(len(starts))], starts, counts])
    no_tree, no_word = torch.full((num_tokens,), NO_TREE, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64)
    return AttentionStep(table, row, place, place, no_tree, no_word, *spans.int().unbind())


def cache_slots(step: AttentionStep, block_size: int, null_block: int) -> Tensor:
    """Where a step's tokens are written."""
    blocks = step.block_table[step.row.clamp(min=0).long(), step.place.long() // block_size]
    return torch.where(step.row < 0, null_block * block_size, blocks * block_size + step.place % block_size)
