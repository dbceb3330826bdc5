"""Several draft tokens for each row in one step: a pass is launched before the token of the pass before is known here.

The tokens go from the sampler to the next pass on the device, and all of them come to the host at once. So what is
drawn may depend on nothing but logits and noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specdec.cache.blocks import CachedSequence
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenSequence, followed
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.staging import Downloads
from specdec.sampling.acceptance import Drawn, drawn_coupled, rank_coupled
from specdec.sampling.on_kernels import LaidOut
from specdec.sampling.pipeline import RowGroup, Sampler

_UNKNOWN = 0
"""In the place of a token that is not known here yet."""


@dataclass(frozen=True, slots=True)
class ChainRow:
    """A row that gets several tokens.

    Attributes:
        sequence: Has room for ``tokens``, and for ``num_tokens - 1`` more.
        spec: Of the sequence, under the coupled rule.
        tokens: In the vocabulary of the sampler.
        num_tokens: How many are drawn.
        num_guesses: As for :func:`specdec.sampling.acceptance.propose`.
        adapter: Slot of the adapter; None for none.
    """

    sequence: CachedSequence
    spec: SequenceSpec
    tokens: TokenSequence
    num_tokens: int
    num_guesses: int
    adapter: int | None


@dataclass(frozen=True, slots=True)
class Chained:
    """What was drawn.

    Attributes:
        drawn: Of each row its tokens in order; none from the first pass on whose numbers are not finite.
        spoilt_rows: As :meth:`ModelRunner.spoilt_rows` of the step before, of all its rows.
    """

    drawn: list[list[Drawn]]
    spoilt_rows: frozenset[int]


def draw_chained(
    runner: ModelRunner,
    sampler: Sampler,
    step: Sequence[RowInput],
    rows: Sequence[ChainRow],
    downloads: Downloads,
) -> Chained:
    """Draw the tokens of all rows by as many passes, and read all but each row's last one.

    A pass takes one upload, with what its logits are sampled by. All passes take one download.

    Args:
        runner: The model with its caches.
        sampler: From logits to tokens.
        step: What the first pass reads: first a row of one logit for each of ``rows``, then rows of none.
        rows: Those of the most tokens first.
        downloads: From the runner's output device.
    """
    groups = [RowGroup(row.spec, row.tokens) for row in rows]
    laid_out = sampler.lay_out(groups, runner.output_device)
    logits = runner.forward(step, extra=() if laid_out is None else laid_out.arrays)
    lengths, flag_rows = [len(row.sequence) for row in rows], runner.flag_rows
    try:
        of_passes, found = _launch(runner, sampler, logits, rows, groups, laid_out)
        is_finite, *arrays = downloads.bring(found)
    except Exception:
        for row, length in zip(rows, lengths, strict=True):
            runner.truncate(row.sequence, length)
        raise
    drawn: list[list[Drawn]] = [[] for _ in rows]
    spoilt_rows = frozenset(flag_rows[is_finite == 0].tolist())
    ended = set(spoilt_rows)
    for number, of_pass in enumerate(of_passes):
        if number:
            # Of each row a flag for its token, and behind all of them one for its logits.
            is_right = arrays.pop(0).reshape(2, -1).all(0)
            ended |= set(np.flatnonzero(~is_right).tolist())
        width = 3 if max(row.num_guesses for row in rows[: len(of_pass)]) else 1
        columns, arrays = arrays[:width], arrays[width:]
        columns[:2] = [column.astype(np.int64) for column in columns[:2]]  # ids; then come scores
        for i, token in enumerate(drawn_coupled(of_pass, columns)):
            if i not in ended:
                drawn[i].append(token)
    for row, length, own in zip(rows, lengths, drawn, strict=True):
        num_read = max(0, len(own) - 1)
        runner.truncate(row.sequence, length + num_read)
        runner.set_tokens(row.sequence, length, [one.token for one in own[:num_read]])
    return Chained(drawn, spoilt_rows)


def _launch(
    runner: ModelRunner,
    sampler: Sampler,
    logits: Tensor,
    rows: Sequence[ChainRow],
    groups: list[RowGroup],
    laid_out: LaidOut | None,
) -> tuple[list[list[RowGroup]], list[Tensor]]:
    """All passes: the groups of each; its flags of what is finite, and what it has drawn, pass by pass."""
    of_passes: list[list[RowGroup]] = []
    found: list[Tensor] = []
    drawing = rows
    while True:
        num_guesses = max(row.num_guesses for row in drawing)
        ranked = rank_coupled(sampler, runner.finite(logits), groups, num_guesses, laid_out, runner.extra)
        of_passes.append(groups)
        found += [runner.is_finite, *ranked]
        drawing = [row for row in drawing if row.num_tokens > len(of_passes)]
        if not drawing:
            return of_passes, found
        groups = [group._replace(tokens=followed(group.tokens, (_UNKNOWN,))) for group in groups[: len(drawing)]]
        laid_out = sampler.lay_out(groups, runner.output_device)
        inputs = [RowInput(row.sequence, [_UNKNOWN], 1, adapter=row.adapter) for row in drawing]
        extra = () if laid_out is None else laid_out.arrays
        logits = runner.forward(inputs, ranked[0][: len(drawing)].int(), extra)
