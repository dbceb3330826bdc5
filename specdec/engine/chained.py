"""Several draft tokens for each row in one step: a pass is launched before the token of the pass before is known here.

The tokens go from the sampler to the next pass on the device, and all of them come to the host at once. So what is
drawn may depend on nothing but logits and noise. Where kernels draw and steps are recorded, all passes are one launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.cache.blocks import CachedSequence
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenSequence, followed
from specdec.executor.chains import ChainsRead, LaunchedChains, num_chain_rows
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.staging import Downloads
from specdec.executor.steps import unread
from specdec.sampling.acceptance import Drawn, drawn_tokens, rank_tokens
from specdec.sampling.chains import ChainSampler
from specdec.sampling.on_kernels import LaidOut
from specdec.sampling.pipeline import RowGroup, Sampler

_UNKNOWN = 0
"""In the place of a token that is not known here yet."""


@dataclass(frozen=True, slots=True)
class ChainRow:
    """A row that gets several tokens.

    Attributes:
        sequence: Has room for ``tokens``, and for ``num_tokens - 1`` more.
        is_parallel: Whether one pass gives all tokens: what stands for all but the first is read with ``tokens``.
        spec: Of the sequence.
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
    is_parallel: bool = False


@dataclass(frozen=True, slots=True)
class Chained:
    """What was drawn.

    Attributes:
        drawn: Of each row its tokens in order; none from the first pass on whose numbers are not finite.
        spoilt_rows: As :meth:`ModelRunner.spoilt_rows` of the step before, of all its rows.
    """

    drawn: list[list[Drawn]]
    spoilt_rows: frozenset[int]


def recorded_chains(runner: ModelRunner, sampler: Sampler) -> ChainSampler | None:
    """Record chains as the limits of the runner's recorded steps say; what draws in them, or None where none are."""
    kernels = sampler.kernels(runner.output_device)
    if kernels is None:
        return None
    return runner.record_chains(
        "Chains", lambda limits: ChainSampler(kernels, num_chain_rows(limits), limits.num_guesses)
    )


@dataclass(frozen=True, slots=True)
class UnreadChains:
    """Recorded chains under way: what is drawn is on the device alone until it is collected.

    Attributes:
        lengths: Of each row, its tokens before those that are drawn.
        groups: The rows for the sampler.
    """

    runner: ModelRunner
    rows: Sequence[ChainRow]
    lengths: Sequence[int]
    groups: list[RowGroup]
    launched: LaunchedChains

    @property
    def num_passes(self) -> int:
        """Of the model."""
        return 1 if self.rows[0].is_parallel else self.rows[0].num_tokens

    def collect(self) -> Chained:
        """What was drawn. Waits for it."""
        try:
            found = self.launched.collect()
            return _settled(
                self.runner, self.rows, self.lengths, found.spoilt_rows, _of_chains(found, self.groups, self.rows)
            )
        except Exception:
            _undo(self.runner, self.rows, self.lengths)
            raise


def begin_chained(
    runner: ModelRunner,
    sampler: Sampler,
    step: Sequence[RowInput],
    rows: Sequence[ChainRow],
    downloads: Downloads,
    recorded: ChainSampler | None = None,
) -> Chained | UnreadChains | None:
    """Draw the tokens of all rows by as many passes, and read all but each row's last one.

    A pass takes one upload, with what its logits are sampled by. All passes take one download. Recorded passes take one
    upload and one launch together.

    Args:
        runner: The model with its caches.
        sampler: From logits to tokens.
        step: What the first pass reads: first a row of one logit for each of ``rows``, then rows of none.
        rows: Those of the most tokens first.
        downloads: From the runner's output device.
        recorded: Draws in recorded chains; None where there are none.

    Returns:
        What was drawn, or recorded passes under way. None, with nothing done, where one pass gives all tokens, and such
        a step is not recorded.
    """
    groups = [RowGroup(row.spec, row.tokens) for row in rows]
    laid_out = sampler.lay_out(groups, runner.output_device)
    is_parallel = rows[0].is_parallel
    lengths = [
        len(own.sequence) + len(own.tokens) - is_parallel * (row.num_tokens - 1)
        for own, row in zip(step, rows, strict=False)
    ]
    try:
        if recorded is not None and laid_out is not None and _can_be_recorded(sampler, rows, recorded):
            launched = runner.launch_chains(step, [row.num_tokens for row in rows], recorded.arrays(laid_out))
            if launched is not None:
                return UnreadChains(runner, rows, lengths, groups, launched)
        if is_parallel:
            return None
        spoilt_rows, passes = _pass_by_pass(runner, sampler, step, rows, groups, laid_out, downloads)
    except Exception:
        _undo(runner, rows, lengths)
        raise
    return _settled(runner, rows, lengths, spoilt_rows, passes)


def _undo(runner: ModelRunner, rows: Sequence[ChainRow], lengths: Sequence[int]) -> None:
    """Take back what a step that has failed may have read."""
    for row, length in zip(rows, lengths, strict=True):
        runner.truncate(row.sequence, min(length, len(row.sequence)))


def _settled(
    runner: ModelRunner,
    rows: Sequence[ChainRow],
    lengths: Sequence[int],
    spoilt_rows: frozenset[int],
    passes: Iterable[_Pass],
) -> Chained:
    """What all passes gave, once each sequence has the tokens that were read of it, and no others."""
    drawn: list[list[Drawn]] = [[] for _ in rows]
    ended = set(spoilt_rows)
    for of_pass, is_right, columns in passes:
        ended |= set(np.flatnonzero(~is_right).tolist())
        for i, token in enumerate(drawn_tokens(of_pass, columns)):
            if i not in ended:
                drawn[i].append(token)
    for row, length, own in zip(rows, lengths, drawn, strict=True):
        num_read = 0 if row.is_parallel else max(0, len(own) - 1)
        runner.truncate(row.sequence, length + num_read)
        runner.set_tokens(row.sequence, length, [one.token for one in own[:num_read]])
    return Chained(drawn, spoilt_rows)


def _can_be_recorded(sampler: Sampler, rows: Sequence[ChainRow], recorded: ChainSampler) -> bool:
    is_plain = not any(sampler.depends_on_tokens(row.spec.sampling) for row in rows)
    return is_plain and max(row.num_guesses for row in rows) <= recorded.num_guesses


_Pass = tuple[list[RowGroup], NDArray[np.bool_], list[NDArray[Any]]]
"""Its groups, whether what they gave is finite, and the columns of :func:`drawn_tokens`."""


def _of_chains(found: ChainsRead, groups: list[RowGroup], rows: Sequence[ChainRow]) -> Iterable[_Pass]:
    """The passes of recorded chains."""
    for number in range(rows[0].num_tokens):
        n = sum(row.num_tokens > number for row in rows)
        num_guesses = max(row.num_guesses for row in rows[:n])
        columns: list[NDArray[Any]] = [found.tokens[number, :n]]
        if num_guesses:
            columns += [ranks[number, :n, : 1 + num_guesses] for ranks in (found.ranked, found.scores)]
        yield groups[:n], found.is_finite[number, :n], columns


def _pass_by_pass(
    runner: ModelRunner,
    sampler: Sampler,
    step: Sequence[RowInput],
    rows: Sequence[ChainRow],
    groups: list[RowGroup],
    laid_out: LaidOut | None,
    downloads: Downloads,
) -> tuple[frozenset[int], list[_Pass]]:
    """Rows of the first pass that are spoilt, and all passes."""
    logits = runner.forward(step, extra=() if laid_out is None else laid_out.arrays)
    flag_rows = runner.flag_rows
    of_passes, found = _launch(runner, sampler, logits, rows, groups, laid_out)
    is_finite, *arrays = downloads.bring(found)
    passes: list[_Pass] = []
    for number, of_pass in enumerate(of_passes):
        is_right: NDArray[np.bool_] = np.ones(len(of_pass), np.bool_)
        if number:
            # Of each row a flag for its token, and behind all of them one for its logits.
            is_right = np.asarray(arrays.pop(0).reshape(2, -1).all(0))
        width = 3 if max(row.num_guesses for row in rows[: len(of_pass)]) else 1
        columns, arrays = arrays[:width], arrays[width:]
        columns[:2] = [column.astype(np.int64) for column in columns[:2]]  # ids; then come scores
        passes.append((of_pass, is_right, columns))
    return frozenset(flag_rows[is_finite == 0].tolist()), passes


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
        ranked = rank_tokens(sampler, runner.finite(logits), groups, num_guesses, laid_out, runner.extra)
        of_passes.append(groups)
        found += [runner.is_finite, *ranked]
        drawing = [row for row in drawing if row.num_tokens > len(of_passes)]
        if not drawing:
            return of_passes, found
        groups = [group._replace(tokens=followed(group.tokens, (_UNKNOWN,))) for group in groups[: len(drawing)]]
        laid_out = sampler.lay_out(groups, runner.output_device)
        inputs = [RowInput(row.sequence, [unread(i)], 1, adapter=row.adapter) for i, row in enumerate(drawing)]
        extra = () if laid_out is None else laid_out.arrays
        logits = runner.forward(inputs, ranked[0].int(), extra)
