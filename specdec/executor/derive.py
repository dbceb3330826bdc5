"""A step's rows as the host says them, and what the device makes of them: positions, cache slots, rows of logits.

The host names each row's slot and counts and lays the tokens behind one another; everything else follows on the device
from the state by slot, by operators whose shapes are a bucket's and that wait for nothing, so that a graph can hold
them. Tokens beyond the rows' are padding: they are written to the null block, and read nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from specdec.executor.slots import UPDATE_VALUE, UPDATE_WORD, SlotState
from specdec.executor.staging import Arrays, Field, Layout, Tensors
from specdec.kernels.segmented import MAX_TREE_TOKENS, NO_TREE, AttentionStep

LAST_TOKEN = -1
"""In place of a token: the last one of the row's slot, which the host need not know."""
NO_PARENT = -2
"""In place of a parent: the token is in no tree."""


@dataclass(frozen=True)
class StepShape:
    """The most that a step may hold.

    Attributes:
        max_rows: R, at most one row for each slot.
        max_tokens: T.
        max_logits: N.
        max_updates: U, differences of the state that go with a step.
        has_trees: Whether drafts may be trees.
    """

    max_rows: int
    max_tokens: int
    max_logits: int
    max_updates: int
    has_trees: bool = False

    @cached_property
    def layout(self) -> Layout:
        """A step's input, all int32.

        - ``slot``: [R]; the padding slot for rows that are not there.
        - ``num_tokens``: [R], at least 1; 0 for rows that are not there.
        - ``num_drafts``: [R], how many of the last tokens are drafts.
        - ``num_logits``: [R], how many of the last tokens want logits: 0, or more than there are drafts.
        - ``tokens``: [T], row by row; ``LAST_TOKEN`` takes the slot's.
        - ``parents``: [T], of a draft in a tree which draft of its row it follows, -1 for the token before them;
          ``NO_PARENT`` for all others. [0] without trees.
        - ``update_word``, ``update_value``: [U]; see :meth:`SlotUpdates.stage`.
        """
        rows = [Field(name, (self.max_rows,)) for name in ("slot", "num_tokens", "num_drafts", "num_logits")]
        updates = [Field(name, (self.max_updates,)) for name in (UPDATE_WORD, UPDATE_VALUE)]
        parents = Field("parents", (self.max_tokens if self.has_trees else 0,))
        return Layout((*rows, Field("tokens", (self.max_tokens,)), parents, *updates))


def lay_out(
    shape: StepShape,
    arrays: Arrays,
    padding_slot: int,
    *,
    slots: Sequence[int],
    num_tokens: Sequence[int],
    num_drafts: Sequence[int],
    num_logits: Sequence[int],
    tokens: ArrayLike,
    parents: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Write a step's rows into its input; differences of the state are written by :meth:`SlotUpdates.stage`.

    Args:
        shape: Of the step.
        arrays: The input, as ``shape.layout`` has it.
        padding_slot: See :attr:`SlotShape.padding_slot`.
        slots: Of each row, none twice.
        num_tokens: Of each row, at least 1.
        num_drafts: Of each row, fewer than its tokens.
        num_logits: Of each row, at most its tokens: 0 where it has no drafts, or more than those.
        tokens: All rows' behind one another, int32.
        parents: By index the rows whose drafts are a tree, of each draft the one that it follows, or -1.

    Raises:
        ValueError: the rows are not as said, or more than the shape holds.
    """
    n, ids = len(slots), np.asarray(tokens, np.int32)
    if not n <= shape.max_rows or len(ids) > shape.max_tokens:
        raise ValueError(
            f"a step holds {shape.max_rows} rows and {shape.max_tokens} tokens at most, got {n} and {len(ids)}"
        )
    slot, count, drafts, logits = (arrays[name] for name in ("slot", "num_tokens", "num_drafts", "num_logits"))
    slot[:n], count[:n], drafts[:n], logits[:n] = slots, num_tokens, num_drafts, num_logits
    slot[n:] = padding_slot
    for column in (count, drafts, logits):
        column[n:] = 0
    count_, drafts_, logits_ = count[:n], drafts[:n], logits[:n]
    if len(set(slots)) != n or (n and not 0 <= min(slots) <= max(slots) < padding_slot):
        raise ValueError(f"slots must be in [0, {padding_slot}), none of them twice")
    if count_.sum() != len(ids) or logits_.sum() > shape.max_logits:
        raise ValueError(
            f"num_tokens must add up to the {len(ids)} tokens, and num_logits to {shape.max_logits} at most, got "
            f"{count_.sum()} and {logits_.sum()}"
        )
    is_right = (drafts_ >= 0) & (drafts_ < count_) & (logits_ >= 0) & (logits_ <= count_)
    is_right &= (drafts_ < logits_) | (drafts_ == 0)
    if not is_right.all():
        row = int(is_right.argmin())
        raise ValueError(
            f"num_drafts must be less than num_tokens, and num_logits 0 without drafts or in (num_drafts, num_tokens], "
            f"got {drafts_[row]}, {count_[row]} and {logits_[row]} in row {row}"
        )
    arrays["tokens"][: len(ids)] = ids
    if shape.has_trees:
        arrays["parents"][:] = NO_PARENT
    if parents:
        _lay_out_trees(shape, arrays, parents)


def _lay_out_trees(shape: StepShape, arrays: Arrays, parents: Mapping[int, Sequence[int]]) -> None:
    if not shape.has_trees:
        raise ValueError("parents must be empty: the step's shape has no trees")
    ends = arrays["num_tokens"].cumsum()
    for row, of_row in parents.items():
        size = int(arrays["num_drafts"][row])
        if len(of_row) != size or size > MAX_TREE_TOKENS:
            raise ValueError(f"parents of row {row} must be of its {size} drafts, {MAX_TREE_TOKENS} at most")
        if any(not -1 <= parent < i for i, parent in enumerate(of_row)):
            raise ValueError(f"parents of row {row} must each be -1 or come before what follows them")
        arrays["parents"][ends[row] - size : ends[row]] = of_row


@dataclass(frozen=True, slots=True)
class DerivedStep:
    """A step on the device; int32 unless said otherwise. T and N are the bucket's.

    Attributes:
        tokens: [T], what the model reads; 0 for padding.
        position: [T], by which they are rotated; 0 for padding.
        row: [T], each token's row; -1 for padding.
        cache_slots: [groups, T], where their keys and values go; in the null block for padding.
        length: [R], positions that each row has in the cache with all its tokens; 0 for rows that are not there.
        token_start: [R + 1], each row's first token; the last is how many there are.
        logit_token: [N], the token of each row of logits; 0 for padding.
        sequence: [N], its row, where it is sampled from; -1 for padding, and for a prompt's logits before the last.
        chosen_position: [N], the absolute position of the token that it chooses.
        draft: [N], the draft token that it follows; -1 for none.
        parent: [N], the row of logits that chose among others that token; -1 for none.
        first: [R], the first row of logits that is sampled from.
        count: [R], how many are; 0 for none.
        attention: Of each group of layers.
        by_row: Of the state's fields but the tables each row's, [R, ..], and the rows' slots as ``slot``.
    """

    tokens: Tensor
    position: Tensor
    row: Tensor
    cache_slots: Tensor
    length: Tensor
    token_start: Tensor
    logit_token: Tensor
    sequence: Tensor
    chosen_position: Tensor
    draft: Tensor
    parent: Tensor
    first: Tensor
    count: Tensor
    attention: tuple[AttentionStep, ...]
    by_row: Tensors


class Deriver:
    """Makes the tensors of a step from its input and the state.

    Args:
        shape: Of the steps.
        state: The sequences'. This object changes it by the input's differences, and by what steps accept.

    Attributes:
        shape: Of the steps.
    """

    def __init__(self, shape: StepShape, state: SlotState) -> None:
        self.shape = shape
        self._state = state
        tables = len(state.shape.null_blocks)
        self._tables = [state.tensors[f"block_table_{i}"] for i in range(tables)]
        self._by_slot = {
            name: tensor
            for name, tensor in state.tensors.items()
            if name != "no_word" and not name.startswith("block_table")
        }
        device = self._tables[0].device
        longest = max(shape.max_tokens, shape.max_logits, shape.max_rows)
        self._count_up = torch.arange(longest, dtype=torch.int32, device=device)
        self._zero = torch.zeros(max(shape.max_rows, 1), dtype=torch.int32, device=device)
        self._no_tree = torch.full((shape.max_tokens,), NO_TREE, dtype=torch.int32, device=device)
        self._no_word = torch.zeros(shape.max_tokens, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)  # of no dimensions it would not widen the result

    def apply_updates(self, given: Tensors) -> None:
        """Take the differences that came with an input; before :meth:`derive`."""
        self._state.apply(given[UPDATE_WORD], given[UPDATE_VALUE])

    def derive(self, given: Tensors, num_tokens: int, num_logits: int) -> DerivedStep:
        """Everything else about a step.

        Args:
            given: The input on the device.
            num_tokens: T of the bucket; the rows have no more.
            num_logits: N of the bucket; the rows want no more.
        """
        rows = self.shape.max_rows
        slot, count, drafts, logits = (given[name] for name in ("slot", "num_tokens", "num_drafts", "num_logits"))
        by_row = {name: tensor.index_select(0, slot) for name, tensor in self._by_slot.items()}
        start = by_row["num_computed_tokens"]
        token_end = count.cumsum(0, dtype=torch.int32)
        token_start = token_end - count

        token = self._count_up[:num_tokens]
        found = torch.searchsorted(token_end, token, right=True, out_int32=True)
        is_padding = found >= rows
        row = found.clamp(max=rows - 1)
        within = token - token_start.index_select(0, row)
        place = (start.index_select(0, row) + within).masked_fill(is_padding, 0)
        given_tokens = given["tokens"][:num_tokens]
        tokens = torch.where(given_tokens < 0, by_row["last_token"].index_select(0, row), given_tokens)
        tokens = tokens.masked_fill(is_padding, 0)
        position, tree_first, tree_word = place, self._no_tree[:num_tokens], self._no_word[:num_tokens]
        if self.shape.has_trees:
            plain = (count - drafts).index_select(0, row)
            position, tree_first, tree_word = self._trees(given["parents"][:num_tokens], within, plain, place)

        tables = [table.index_select(0, slot) for table in self._tables]
        size, width = self._state.shape.block_size, self._state.shape.max_blocks
        entry = row * width + place // size
        cache_slots = torch.stack(
            [
                (table.view(-1).index_select(0, entry) * size + place % size).masked_fill(is_padding, null * size)
                for table, null in zip(tables, self._state.shape.null_blocks, strict=True)
            ]
        )
        row = row.masked_fill(is_padding, -1)
        is_gone = count == 0
        span_row = self._count_up[:rows].masked_fill(is_gone, -1)
        no_span = self._zero[:rows]
        attention = tuple(
            AttentionStep(
                block_table=table,
                row=row,
                place=place,
                position=position,
                tree_first=tree_first,
                tree_word=tree_word,
                span_row=span_row,
                span_start=token_start,
                span_count=count,
                span_low=no_span,
                span_high=no_span - 1,
            )
            for table in tables
        )

        sampled = (drafts + 1).masked_fill(logits == 0, 0)
        logit_end = logits.cumsum(0, dtype=torch.int32)
        first = logit_end - sampled
        logit = self._count_up[:num_logits]
        found = torch.searchsorted(logit_end, logit, right=True, out_int32=True)
        is_no_logit = found >= rows
        sequence = found.clamp(max=rows - 1)
        # A row's logits end where its tokens do.
        logit_token = logit + (token_end - logit_end).index_select(0, sequence)
        logit_token = logit_token.masked_fill(is_no_logit, 0)
        order = logit - first.index_select(0, sequence)
        is_no_draft = (order < 1) | is_no_logit
        parent = logit - 1
        if self.shape.has_trees:
            of_tree = given["parents"].index_select(0, logit_token)
            parent = torch.where(of_tree < -1, parent, first.index_select(0, sequence) + 1 + of_tree)
        return DerivedStep(
            tokens=tokens,
            position=position,
            row=row,
            cache_slots=cache_slots,
            length=(start + count).masked_fill(is_gone, 0),
            token_start=torch.cat((token_start, token_end[-1:])),
            logit_token=logit_token,
            sequence=sequence.masked_fill((order < 0) | is_no_logit, -1),
            chosen_position=(position.index_select(0, logit_token) + 1).masked_fill(is_no_logit, 0),
            draft=tokens.index_select(0, logit_token).masked_fill(is_no_draft, -1),
            parent=parent.masked_fill(is_no_draft, -1),
            first=first,
            count=sampled,
            attention=attention,
            by_row={**by_row, "slot": slot},
        )

    def _trees(self, parents: Tensor, within: Tensor, plain: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, first places and words of tokens; all [T], ``within`` and ``plain`` counted from the row's first.

        A token's ancestors are found by doubling how far back each one looks.
        """
        is_tree = parents > NO_PARENT
        number = within - plain
        word = torch.bitwise_left_shift(self._one, number.clamp(0, MAX_TREE_TOKENS - 1)).masked_fill(~is_tree, 0)
        depth = torch.ones_like(number)
        token = self._count_up[: len(number)]
        up = (token - number + parents).masked_fill(parents < 0, -1)
        distance = 1
        while distance < MAX_TREE_TOKENS:
            above, is_top = up.clamp(min=0), up < 0
            word = word | word.index_select(0, above).masked_fill(is_top, 0)
            depth = depth + depth.index_select(0, above).masked_fill(is_top, 0)
            up = up.index_select(0, above).masked_fill(is_top, -1)
            distance *= 2
        first = place - number
        position = torch.where(is_tree, first + depth - 1, place)
        return position, first.masked_fill(~is_tree, NO_TREE), word

    def advance(self, given: Tensors, num_accepted: Tensor, last_token: Tensor) -> None:
        """Move the state past a step: rows that were sampled from by what they accepted, others by all their tokens.

        Args:
            given: The step's input on the device.
            num_accepted: int32 [R], accepted drafts.
            last_token: int32 [R], the token chosen after them; of rows that were not sampled from nothing is taken.
        """
        slot, count, logits = given["slot"], given["num_tokens"], given["num_logits"]
        length, last = self._by_slot["num_computed_tokens"], self._by_slot["last_token"]
        kept = torch.where(logits > 0, count - given["num_drafts"] + num_accepted, count)
        length.index_put_((slot,), length.index_select(0, slot) + kept)
        last.index_put_((slot,), torch.where(logits > 0, last_token, last.index_select(0, slot)))
