"""The rows of a batch: which sequence and which position each row of logits belongs to.

Large batches of logits in slices, so that what is computed of them takes bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specdec.core.drafts import depths, path_to
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import TokenSequence, followed
from specdec.core.types import TokenLogprobs, Tokens


class RowGroup(NamedTuple):
    """The 1 + len(draft) consecutive rows of one sequence in a batch.

    Row 0 is the model's answer to ``tokens``, row 1 + i its answer to ``tokens`` and the draft tokens that end with
    token i: ``tokens + draft[: 1 + i]`` for a chain, the token's path for a tree.

    Attributes:
        spec: The sequence's parameters.
        tokens: Prompt and output before the first row: int32 [n] from the engine. Never changed, never kept.
        draft: Draft tokens under verification; empty for plain decoding and for drafting.
        mask: int32 [1 + len(draft), V / 32], a bit for each token that the sequence's grammar allows in each row; None
            where it has none, or where that is not known yet.
        parents: Where the draft is a tree, which of its tokens each one follows, -1 for none; empty for a chain.
    """

    spec: SequenceSpec
    tokens: TokenSequence
    draft: Tokens = ()
    mask: Tensor | None = None
    parents: Tokens = ()

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before the group's first row."""
        return len(self.tokens) - self.spec.output_start

    @property
    def depths(self) -> Sequence[int]:
        """How many draft tokens stand before each row."""
        return [0, *depths(self.parents)] if self.parents else range(1 + len(self.draft))

    def path(self, row: int) -> Sequence[int]:
        """The draft tokens before a row, by their numbers, in order."""
        return path_to(self.parents, row - 1) if self.parents else range(row)

    def by_row(self) -> list[RowGroup]:
        """Each row as a group of its own, after the tokens of its path."""
        by_row = []
        for row in range(1 + len(self.draft)):
            mask = None if self.mask is None else self.mask[row : row + 1]
            by_row.append(RowGroup(self.spec, followed(self.tokens, [self.draft[i] for i in self.path(row)]), (), mask))
        return by_row


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

    @property
    def rows(self) -> list[int]:
        """The rows of its group that the run's tokens were chosen in."""
        return [0, *(1 + node for node in self.path or range(self.num_accepted))]


LogprobReport = tuple[TokenLogprobs, ...] | None
"""What is reported of a run's tokens; None where a request asks for nothing."""

UNUSED_TRUNCATION = (0, 1, -np.inf)
"""top_k, top_p and the logarithm of min_p that keep all tokens."""


class Rows:
    """The groups of a batch laid out over its rows, in order: numpy lays out what is per row."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self.groups = groups
        self.counts = [1 + len(draft) for _, _, draft, *_ in groups]
        *self.starts, self.num_rows = accumulate(self.counts, initial=0)

    def spread(self, values: ArrayLike) -> NDArray[Any]:
        """One entry per group, repeated for each of its rows."""
        return np.repeat(np.asarray(values), self.counts, axis=0)

    def seeds(self) -> list[int]:
        """Each row's seed."""
        seeds: list[int] = self.spread(np.array([group.spec.seed for group in self.groups], dtype=np.uint64)).tolist()
        return seeds

    def positions(self) -> list[int]:
        """The absolute position of the token that each row chooses; siblings share theirs."""
        positions: list[int] = self.position_array().tolist()
        return positions

    def position_array(self) -> NDArray[np.int64]:
        """The same."""
        lengths = np.array([len(group.tokens) for group in self.groups], np.int64)
        if self.num_rows == len(lengths):
            return lengths
        positions: NDArray[np.int64] = self.spread(lengths) + self.offsets()
        return positions

    def offsets(self) -> NDArray[np.int64]:
        """How many draft tokens stand before each row."""
        offsets: NDArray[np.int64] = np.arange(self.num_rows) - self.spread(np.array(self.starts, dtype=np.int64))
        for group, start in self._trees():
            offsets[start : start + 1 + len(group.draft)] = group.depths
        return offsets

    def _trees(self) -> list[tuple[RowGroup, int]]:
        """The groups whose drafts are trees, and their first rows."""
        return [(group, start) for group, start in zip(self.groups, self.starts, strict=True) if group.parents]

    def drafts(self) -> NDArray[np.int32]:
        """The draft token that each row follows; -1 for first rows."""
        drafts = np.full(self.num_rows, -1, np.int32)
        if self.num_rows > len(self.groups):
            is_drafted = np.ones(self.num_rows, np.bool_)
            is_drafted[self.starts] = False
            drafts[is_drafted] = [*chain.from_iterable(group.draft for group in self.groups)]
        return drafts

    def parents(self) -> NDArray[np.int32]:
        """The row that chose among others the draft token that each row follows; -1 for first rows."""
        parents = np.arange(-1, self.num_rows - 1, dtype=np.int32)
        parents[self.starts] = -1
        for group, start in self._trees():
            parents[start + 1 : start + 1 + len(group.parents)] = np.array(group.parents) + (start + 1)
        return parents

    def temperatures(self) -> NDArray[np.float32]:
        """Each group's temperature; 0 where the largest logit is taken."""
        params = [group.spec.sampling for group in self.groups]
        return np.array([0.0 if one.is_greedy else one.temperature for one in params], np.float32)

    def truncation(self) -> NDArray[np.float64]:
        """Each group's top_k, top_p, and the logarithm of its min_p: [groups, 3]."""
        params = [group.spec.sampling for group in self.groups]
        values = np.array([(one.top_k, one.top_p, one.min_p) for one in params], np.float64).reshape(-1, 3)
        with np.errstate(divide="ignore"):
            np.log(values[:, 2], out=values[:, 2])
        return values

    def using(self, feature: Callable[[SamplingParams], object]) -> list[int]:
        """Indexes of the groups whose parameters use a feature."""
        return [i for i, group in enumerate(self.groups) if feature(group.spec.sampling)]

    def part(self, indexes: Sequence[int]) -> Rows:
        """The rows of some groups, numbered from 0."""
        return self if len(indexes) == len(self.groups) else Rows([self.groups[i] for i in indexes])

    def numbers(self, indexes: Sequence[int]) -> NDArray[np.int64]:
        """The row numbers, in this batch, of some groups, which are in order."""
        is_in = np.zeros(len(self.groups), dtype=np.bool_)
        is_in[list(indexes)] = True
        return np.flatnonzero(self.spread(is_in))


_ALIGNMENT_BYTES = 16


def on_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """The same arrays on a device, in one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(values) for values in arrays]
    sizes = [-(-values.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for values in arrays]
    starts = list(accumulate(sizes, initial=0))
    packed = np.zeros(starts[-1], dtype=np.uint8)
    for start, values in zip(starts, arrays, strict=False):
        packed[start : start + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    whole = torch.from_numpy(packed).to(device)
    return [
        whole[start : start + values.nbytes].view(torch.from_numpy(values[:0]).dtype).view(values.shape)
        for start, values in zip(starts, arrays, strict=False)
    ]


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
    if (num_rows := sum(counts)) <= most:
        yield slice(0, len(counts)), slice(0, num_rows)
        return
    group = row = num_rows = 0
    for number, count in enumerate(counts):
        if num_rows and num_rows + count > most:
            yield slice(group, number), slice(row, row + num_rows)
            group, row, num_rows = number, row + num_rows, 0
        num_rows += count
    yield slice(group, len(counts)), slice(row, row + num_rows)
