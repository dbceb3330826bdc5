"""Which of a step's tokens each sequence's state is moved by, and where states, inputs and windows are kept.

Built once per step; index tensors are made once per device and kind and used by every recurrent layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from specdec.cache.recurrent.slots import Window

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StateRow:
    """One sequence's part in a step.

    Attributes:
        start: Index of its first new token among the step's tokens.
        num_new_tokens: At least 1.
        num_computed_tokens: Tokens its state has seen before.
        slot: Where its tensors are.
        oldest: Where its window begins before the step.
        newest: Length whose state was computed last before the step.
        oldest_after: Where its window begins after the step.
    """

    start: int
    num_new_tokens: int
    num_computed_tokens: int
    slot: int
    oldest: int
    newest: int
    oldest_after: int

    @property
    def is_cut_back(self) -> bool:
        """Whether tokens were taken back since the last step."""
        return self.newest != self.num_computed_tokens

    @property
    def num_ahead(self) -> int:
        """First new tokens that are read before what is kept for the window begins; see :func:`reads_ahead`."""
        return max(0, self.oldest - self.num_computed_tokens)

    @property
    def length(self) -> int:
        """Tokens its state has seen after the step."""
        return self.num_computed_tokens + self.num_new_tokens


_LEAST_AHEAD = 64
"""Fewer tokens gain nothing from a scan that is meant for many."""


def reads_ahead(row: StateRow) -> StateRow:
    """A row with many new tokens, as it is behind those that come before its window; others as they are."""
    is_long = row.oldest_after - row.num_computed_tokens >= _LEAST_AHEAD and not row.is_cut_back
    return replace(row, oldest=row.oldest_after, newest=row.oldest_after) if is_long else row


class ScanGroup:
    """Rows that are scanned side by side: short ones filled up with their own last token, or a long one alone.

    Attributes:
        rows: B of them.
        num_tokens: T, new tokens of the longest.
        is_padded: Whether some are shorter.
    """

    def __init__(self, rows: Sequence[StateRow], device: torch.device) -> None:
        self.rows = rows
        self.num_tokens = max(row.num_new_tokens for row in rows)
        self.is_padded = any(row.num_new_tokens < self.num_tokens for row in rows)
        first = rows[0].start
        self._slice: slice | None = None
        if all(row.start == first + i * self.num_tokens for i, row in enumerate(rows)) and not self.is_padded:
            self._slice = slice(first, first + len(rows) * self.num_tokens)
        self.lengths = torch.tensor([row.num_new_tokens for row in rows], device=device)
        offsets = torch.arange(self.num_tokens, device=device)
        starts = torch.tensor([row.start for row in rows], device=device)
        self._indices = starts[:, None] + torch.minimum(offsets, self.lengths[:, None] - 1)
        self.is_padding = offsets >= self.lengths[:, None]

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """[1, N, ...] of the step as [B, T, ...] of the group."""
        if self._slice is not None:
            return values[0, self._slice].reshape(*self._indices.shape, *values.shape[2:])
        return values[0].index_select(0, self._indices.flatten()).view(*self._indices.shape, *values.shape[2:])

    def put(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write [B, T, ...] of the group into [1, N, ...] of the step."""
        if self._slice is not None:
            into[0, self._slice] = values.flatten(0, 1)
        else:
            kept = ~self.is_padding
            into[0].index_copy_(0, self._indices[kept], values[kept].to(into.dtype))


class StateStep:
    """A step's rows as the recurrent layers see them.

    Args:
        rows: Spans that follow one another and cover all ``num_tokens``.
        num_tokens: N.
        window: How far back states reach.
    """

    def __init__(self, rows: Sequence[StateRow], num_tokens: int, window: Window) -> None:
        self.rows = rows
        self.num_tokens = num_tokens
        self.window = window
        self._memo: dict[tuple[object, ...], Any] = {}

    def memo(self, kind: tuple[object, ...], make: Callable[[], _T]) -> _T:
        """What ``make`` gives, made once per step and kind."""
        if kind not in self._memo:
            self._memo[kind] = make()
        value: _T = self._memo[kind]
        return value

    def groups(self, device: torch.device) -> list[ScanGroup]:
        """All rows: those no longer than the window in one group, each longer one alone."""

        def make() -> list[ScanGroup]:
            short = [row for row in self.rows if row.num_new_tokens <= self.window.num_tokens]
            long = [[row] for row in self.rows if row.num_new_tokens > self.window.num_tokens]
            return [ScanGroup(rows, device) for rows in ([short] if short else []) + long]

        return self.memo(("groups", device), make)

    def by_groups(self, device: torch.device, run: Callable[[int, ScanGroup], torch.Tensor]) -> torch.Tensor:
        """What ``run`` gives for each group, [B, T, ...], in the order of the step's tokens: [1, N, ...]."""
        groups = self.groups(device)
        results = [run(index, group) for index, group in enumerate(groups)]
        if len(groups) == 1 and not groups[0].is_padded:
            return results[0].flatten(0, 1).unsqueeze(0)
        outputs = results[0].new_empty((1, self.num_tokens, *results[0].shape[2:]))
        for group, result in zip(groups, results, strict=True):
            group.put(result, outputs)
        return outputs
