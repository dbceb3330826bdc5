"""The rows of a batch: which sequence and which position each row of logits belongs to.

Large batches of logits in slices, so that what is computed of them takes bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from typing import NamedTuple, TypeVar

from torch import Tensor

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import TokenSequence
from specdec.core.types import Tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The 1 + len(draft) consecutive rows of one sequence in a batch.

    Row i is the model's answer to ``tokens + draft[:i]``; the token it chooses stands at position ``len(tokens) + i``.

    Attributes:
        spec: The sequence's parameters.
        tokens: Prompt and output before the first row: int32 [n] from the engine. Never changed, never kept.
        draft: Draft tokens under verification; empty for plain decoding and for drafting.
        mask: int32 [1 + len(draft), V / 32], a bit for each token that the sequence's grammar allows in each row; None
            where it has none, or where that is not known yet.
    """

    spec: SequenceSpec
    tokens: TokenSequence
    draft: Tokens = ()
    mask: Tensor | None = field(default=None, compare=False)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before the group's first row."""
        return len(self.tokens) - self.spec.output_start


class VerifiedRun(NamedTuple):
    """What a rule made of a sequence's draft.

    Attributes:
        run: The accepted draft tokens, then the next token: the corrected, the bonus, or the plain one.
        num_accepted: Draft tokens in ``run``: one less than its length, since the next token is not drafted.
        path: Of a draft that is a tree, the places in it of the accepted tokens.
    """

    run: Tokens
    num_accepted: int
    path: Tokens = ()


class Rows:
    """The groups of a batch laid out over its rows, in order. Builds lists per sequence; nothing here is per token."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self.groups = groups
        self.counts = [1 + len(group.draft) for group in groups]
        *self.starts, self.num_rows = accumulate(self.counts, initial=0)

    def spread(self, values: Iterable[T]) -> list[T]:
        """One value per group, repeated for each of its rows."""
        return list(chain.from_iterable(map(repeat, values, self.counts)))

    def seeds(self) -> list[int]:
        """Each row's seed."""
        return self.spread(group.spec.seed for group in self.groups)

    def positions(self) -> list[int]:
        """The absolute position of the token each row chooses."""
        lengths = [len(group.tokens) for group in self.groups]
        ranges = (range(length, length + count) for length, count in zip(lengths, self.counts, strict=True))
        return list(chain.from_iterable(ranges))

    def offsets(self) -> list[int]:
        """Each row's number within its group: how many draft tokens stand before it."""
        return list(chain.from_iterable(map(range, self.counts)))

    def using(self, feature: Callable[[SamplingParams], object]) -> list[int]:
        """Indexes of the groups whose parameters use a feature."""
        return [i for i, group in enumerate(self.groups) if feature(group.spec.sampling)]

    def part(self, indexes: Sequence[int]) -> Rows:
        """The rows of some groups, numbered from 0."""
        return self if len(indexes) == len(self.groups) else Rows([self.groups[i] for i in indexes])

    def numbers(self, indexes: Sequence[int]) -> list[int]:
        """The row numbers, in this batch, of some groups."""
        return list(chain.from_iterable(range(self.starts[i], self.starts[i] + self.counts[i]) for i in indexes))


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
