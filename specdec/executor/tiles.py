"""A step in tiles: passes over one and the same number of tokens, so that libraries always see the same shapes.

A library's product of a row may have other bits where it stands among other numbers of rows. So where bits count a step
is run as several passes one after another, the last one filled up. A tile's tokens read what those before it wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RowPart(NamedTuple):
    """Tokens of one row that are in a tile.

    Attributes:
        row: The row's number.
        start: Where they begin in the tile.
        num_tokens: How many.
        offset: The row's tokens before them in the step.
    """

    row: int
    start: int
    num_tokens: int
    offset: int


class Tile(NamedTuple):
    """A pass of a step.

    Attributes:
        start: The first token.
        num_tokens: Of the step's rows; the others are padding.
        parts: The rows.
        logits: Which tokens' logits are wanted, int64, counted in the tile.
    """

    start: int
    num_tokens: int
    parts: Sequence[RowPart]
    logits: NDArray[np.int64]


def tiles_of(num_tokens: NDArray[np.int64], num_logits: NDArray[np.int64], size: int) -> Iterator[Tile]:
    """Cut a step whose rows lie behind one another.

    Args:
        num_tokens: Of each row.
        num_logits: How many of each row's last tokens want logits.
        size: Tokens of a tile.
    """
    ends = num_tokens.cumsum()
    starts, total = ends - num_tokens, int(ends[-1])
    wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, num_logits, strict=True)])
    row = 0
    for first in range(0, total, size):
        last = min(first + size, total)
        parts = []
        while row < len(ends) and starts[row] < last:
            begin, end = max(int(starts[row]), first), min(int(ends[row]), last)
            parts.append(RowPart(row, begin - first, end - begin, begin - int(starts[row])))
            if ends[row] > last:
                break
            row += 1
        inside = wanted[(wanted >= first) & (wanted < last)] - first
        yield Tile(first, last - first, parts, inside)
