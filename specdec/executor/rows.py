"""What a forward pass is given of each sequence, and how its adapters see that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.cache.blocks import BlockPool, CachedSequence
from specdec.executor.steps import StepRows, unread
from specdec.executor.tiles import RowPart
from specdec.models.lora.slots import AdapterRun


class RowInput(NamedTuple):
    """One sequence's part in a forward pass.

    Attributes:
        sequence: What is cached of it; room for ``tokens`` is reserved.
        tokens: What follows, at least one token: a part of a prompt, a token, or a token and drafts. Those that are on
            the device alone are named by :func:`specdec.executor.steps.unread`.
        num_logits: How many of the last positions' logits are wanted; 0 for a part of a prompt.
        parents: Where the last tokens are a tree, which of these each one follows, -1 for the token before them, whose
            logits are wanted like theirs; they are cached one after another, and :meth:`ModelRunner.keep_paths` comes
            next.
        adapter: Slot of the adapter that they use; None for the model as it is.
    """

    sequence: CachedSequence
    tokens: Sequence[int]
    num_logits: int
    parents: Sequence[int] = ()
    adapter: int | None = None


class HeadInput(NamedTuple):
    """One sequence's part in a pass of heads; see :meth:`ModelRunner.forward_heads`.

    Attributes:
        sequence: In whose blocks there is room for the tokens.
        start: Position at which the first of them is cached.
        tokens: At least one, and one more than ``parents`` has.
        parents: As of a :class:`RowInput`: the last tokens are a tree.
    """

    sequence: CachedSequence
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] = ()


def lay_out_rows(
    rows: Sequence[RowInput],
    vocab_size: int,
    pool: BlockPool,
    has_states: bool,
    num_passes: NDArray[np.int64] | None = None,
    num_drawn: int = 0,
) -> StepRows:
    """All rows' tokens behind one another, and their numbers.

    Args:
        rows: At least one; no sequence twice.
        vocab_size: The model's.
        pool: In which room is reserved.
        has_states: Whether sequences have recurrent states.
        num_passes: See :class:`StepRows`.
        num_drawn: How many tokens are on the device alone.

    Raises:
        ValueError: see :meth:`ModelRunner.forward`.
    """
    if not rows or len({row.sequence for row in rows}) != len(rows):
        raise ValueError("rows must not be empty, nor hold a sequence twice")
    counts = np.array([len(row.tokens) for row in rows])
    cached = np.array([len(row.sequence.tokens.array) for row in rows])
    logits = np.array([row.num_logits for row in rows])
    room = np.array([row.sequence.room for row in rows])
    is_wrong = (counts < 1) | (logits < 0) | (logits > counts)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise ValueError(f"num_logits must be in [0, {counts[row]}], the number of tokens, got {logits[row]}")
    tokens = np.fromiter(chain.from_iterable([row.tokens for row in rows]), np.int64)
    read = tokens
    if num_drawn:
        read = tokens[(tokens > unread(0)) | (tokens < unread(num_drawn - 1))]
    if not 0 <= read.min(initial=0) <= read.max(initial=0) < vocab_size:
        raise ValueError(f"tokens must be in [0, {vocab_size})")
    parents = {i: row.parents for i, row in enumerate(rows) if row.parents}
    laid_out = StepRows(tokens.astype(np.int32), counts, cached, logits, parents, num_passes=num_passes)
    needed = laid_out.lengths_after
    has_none = needed > room
    for row in [i for i, one in enumerate(rows) if one.sequence.may_share_tail]:
        has_none[row] = not pool.is_reserved(rows[row].sequence, int(needed[row]))
    if has_none.any():
        row = int(has_none.argmax())
        raise ValueError(f"no room is reserved for {needed[row] - cached[row]} tokens after position {cached[row]}")
    for sequence in [row.sequence for row in rows] if has_states else ():
        if sequence.state is None or sequence.state.oldest > len(sequence.tokens):
            raise ValueError("no room is reserved for the recurrent state, or a failed step has spoilt it")
    return laid_out


def lay_out_heads(
    rows: Sequence[HeadInput], num_passes: NDArray[np.int64] | None = None, num_drawn: int = 0
) -> StepRows:
    """The same of heads' rows.

    Args:
        rows: At least one; no sequence twice.
        num_passes: See :class:`StepRows`.
        num_drawn: How many of the first rows draw, in chains.

    Raises:
        ValueError: No room is reserved for a row.
    """
    counts = np.array([len(row.tokens) for row in rows])
    laid_out = StepRows(
        np.array([token for row in rows for token in row.tokens], np.int32),
        counts,
        np.array([row.start for row in rows]),
        counts if num_passes is None else (np.arange(len(rows)) < num_drawn).astype(np.int64),
        {i: row.parents for i, row in enumerate(rows) if row.parents},
        num_passes=num_passes,
    )
    for row, length in zip(rows, laid_out.lengths_after.tolist(), strict=True):
        if length > row.sequence.room:
            raise ValueError(f"no room is reserved for {length - row.start} tokens of heads from {row.start} on")
    return laid_out


def adapter_runs(rows: Sequence[RowInput], parts: Sequence[RowPart]) -> list[AdapterRun]:
    """Tokens of a pass with the same adapter, in one run where their rows lie behind one another."""
    runs: list[AdapterRun] = []
    for part in parts:
        adapter, start, end = rows[part.row].adapter, part.start, part.start + part.num_tokens
        if adapter is not None and runs and runs[-1][0] == adapter and runs[-1][2] == start:
            runs[-1] = adapter, runs[-1][1], end
        elif adapter is not None:
            runs.append((adapter, start, end))
    return runs
