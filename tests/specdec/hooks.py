"""Logits processors that are written row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.core.params import SequenceSpec
from specdec.sampling.pipeline import LogitsProcessor
from specdec.sampling.rows import RowGroup

RowHook = Callable[[SequenceSpec, list[int], Tensor], Tensor | None]
"""Given a sequence, all tokens before a row, and the row's logits [V]; gives others, or changes those in place."""


def by_row(hook: RowHook) -> LogitsProcessor:
    """A processor that does to each row what ``hook`` does."""

    def process(groups: Sequence[RowGroup], logits: Tensor) -> None:
        rows = iter(logits)
        for group in groups:
            for i in range(1 + len(group.draft)):
                row = next(rows)
                changed = hook(group.spec, [*group.tokens, *group.draft[:i]], row)
                if changed is not None:
                    row.copy_(changed)
        assert next(rows, None) is None

    return process
