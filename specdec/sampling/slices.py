"""Large batches of logits in slices, so that what is computed of them takes bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_SLICE_BYTES = 128 << 20
"""Of the float32 logits that are sampled at once; that takes some six times as much in between."""
_BYTES_PER_LOGIT = 4


def max_slice_rows(vocab_size: int) -> int:
    """Most rows of logits that are sampled at once, at least 1."""
    return max(1, MAX_SLICE_BYTES // (_BYTES_PER_LOGIT * vocab_size))


def row_slices(counts: Sequence[int], vocab_size: int) -> Iterator[tuple[slice, slice]]:
    """Consecutive groups of rows that together are no more than are sampled at once; a group stays whole.

    Args:
        counts: Rows of each group, in order.
        vocab_size: Columns of the logits.

    Yields:
        Numbers of the groups, and of their rows.
    """
    most = max_slice_rows(vocab_size)
    group = row = num_rows = 0
    for number, count in enumerate(counts):
        if num_rows and num_rows + count > most:
            yield slice(group, number), slice(row, row + num_rows)
            group, row, num_rows = number, row + num_rows, 0
        num_rows += count
    yield slice(group, len(counts)), slice(row, row + num_rows)
