"""A step's rows as the host says them, and what the device makes of them: positions, cache slots, rows of logits.

The host names each row's slot and counts and lays the tokens behind one another; everything else follows on the device
from the state by slot, by operators whose shapes are a bucket's and that wait for nothing, so that a graph can hold
them. Tokens beyond the rows' are padding: they are written to the null block, and read nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specdec.core.drafts import MAX_TREE_TOKENS
from specdec.executor.slots import UPDATE_VALUE, UPDATE_WORD, SlotState
from specdec.executor.staging import Arrays, Field, Layout, Tensors
from specdec.kernels.recurrent import StateTensors
from specdec.kernels.segmented import NO_TREE, AttentionStep

NO_PARENT = -2
"""In place of a parent: the token is in no tree."""
_PER_TOKEN = ("row", "place", "position", "tree_first", "tree_word")
"""What an :class:`AttentionStep` has for each token."""


@dataclass(frozen=True)
class StepShape:
    """The most that a step may hold.

    Attributes:
        max_rows: R, at most one row for each slot.
        max_tokens: T.
        max_updates: U, differences of the state that go with a step.
        has_trees: Whether drafts may be trees.
        has_states: Whether rows have recurrent states.
        has_adapters: Whether rows may use adapters.
        has_chains: Whether rows may have a part in passes behind the step's own.
    """

    max_rows: int
    max_tokens: int
    max_updates: int
    has_trees: bool = False
    has_states: bool = False
    has_adapters: bool = False
    has_chains: bool = False

    @cached_property
    def layout(self) -> Layout:
        """A step's input, all int32.

        R is one more than rows: the last takes the padding.

        - ``slot``: [R]; the padding slot for rows that are not there.
        - ``num_tokens``: [R], at least 1; 0 for rows that are not there.
        - ``num_drafts``: [R], how many of the last tokens are drafts.
        - ``num_logits``: [R], how many of the last tokens want logits: 0, or more than there are drafts.
        - ``tokens``: [T], row by row.
        - ``parents``: [T], of a draft in a tree which draft of its row it follows, -1 for the token before them;
          ``NO_PARENT`` for all others. [0] without trees.
        - ``states``: [4, R], slot, oldest, newest and oldest_after of :class:`StateTensors`. [4, 0] without states.
        - ``adapter``: [R], the slot of the row's adapter; -1 for none. [0] without adapters.
        - ``num_passes``: [R], how many passes the row has a part in; [0] without chains.
        - ``update_word``, ``update_value``: [U]; see :meth:`SlotUpdates.stage`.
        """
        rows = [Field(name, (self.max_rows + 1,)) for name in ("slot", "num_tokens", "num_drafts", "num_logits")]
        updates = [Field(name, (self.max_updates,)) for name in (UPDATE_WORD, UPDATE_VALUE)]
        parents = Field("parents", (self.max_tokens if self.has_trees else 0,))
        states = Field("states", (4, self.max_rows + 1 if self.has_states else 0))
        adapter = Field("adapter", (self.max_rows + 1 if self.has_adapters else 0,))
        passes = Field("num_passes", (self.max_rows + 1 if self.has_chains else 0,))
        return Layout((*rows, Field("tokens", (self.max_tokens,)), parents, states, adapter, passes, *updates))


def lay_out(
    shape: StepShape,
    arrays: Arrays,
    padding_slot: int,
    *,
    slots: Sequence[int] | NDArray[np.int64],
    num_tokens: ArrayLike,
    num_drafts: ArrayLike,
    num_logits: ArrayLike,
    tokens: ArrayLike,
    parents: Mapping[int, Sequence[int]] | None = None,
    states: NDArray[np.int64] | None = None,
    adapters: NDArray[np.int64] | None = None,
    num_passes: NDArray[np.int64] | None = None,
    is_checked: bool = False,
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
        states: [4, R] of the rows, where the shape has states.
        adapters: [R] of the rows, where the shape has adapters; None where no row uses one.
        num_passes: [R] of the rows, at least 1, where the shape has chains; None for a step of one pass.
        is_checked: The caller has seen to it that rows are as said, and not more than the shape holds.

    Raises:
        ValueError: the rows are not as said, or more than the shape holds.
    """
    n, ids = len(slots), np.asarray(tokens, np.int32)
    if not is_checked:
        numbers = (np.asarray(values) for values in (num_tokens, num_drafts, num_logits))
        _check_rows(shape, padding_slot, slots, len(ids), *numbers)
    slot, count, drafts, logits = (arrays[name] for name in ("slot", "num_tokens", "num_drafts", "num_logits"))
    slot[:n], count[:n], drafts[:n], logits[:n] = slots, num_tokens, num_drafts, num_logits
    slot[n:], count[n:], drafts[n:], logits[n:] = padding_slot, 0, 0, 0
    arrays["tokens"][: len(ids)], arrays["tokens"][len(ids) :] = ids, 0
    if shape.has_adapters:
        arrays["adapter"][:] = -1
        if adapters is not None:
            arrays["adapter"][:n] = adapters
    if shape.has_chains:
        arrays["num_passes"][:] = 0
        if num_passes is not None:
            arrays["num_passes"][:n] = num_passes
    if states is not None and shape.has_states:
        arrays["states"][:, :n] = states
    if shape.has_trees:
        arrays["parents"][:] = NO_PARENT
    if parents:
        _lay_out_trees(shape, arrays, parents)


def _check_rows(
    shape: StepShape,
    padding_slot: int,
    slots: Sequence[int] | NDArray[np.int64],
    num_ids: int,
    count: NDArray[Any],
    drafts: NDArray[Any],
    logits: NDArray[Any],
) -> None:
    n = len(slots)
    if not n <= shape.max_rows or num_ids > shape.max_tokens:
        raise ValueError(
            f"a step holds {shape.max_rows} rows and {shape.max_tokens} tokens at most, got {n} and {num_ids}"
        )
    if len(set(slots)) != n or (n and not 0 <= min(slots) <= max(slots) < padding_slot):
        raise ValueError(f"slots must be in [0, {padding_slot}), none of them twice")
    if count.sum() != num_ids:
        raise ValueError(f"num_tokens must add up to the {num_ids} tokens, got {count.sum()}")
    is_wrong = (drafts >= count) | (logits > count) | ((drafts >= logits) & (drafts != 0))
    if is_wrong.any() or min(drafts.min(initial=0), logits.min(initial=0)) < 0:
        row = int(is_wrong.argmax())
        raise ValueError(
            f"num_drafts must be less than num_tokens, and num_logits 0 without drafts or in (num_drafts, num_tokens], "
            f"got {drafts[row]}, {count[row]} and {logits[row]} in row {row}"
        )


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
    """A step's tokens on the device; int32. T is the bucket's.

    Attributes:
        tokens: [T], what the model reads; 0 for padding.
        position: [T], by which they are rotated; 0 for padding.
        cache_slots: Of each group [T], where their keys and values go; in the null block for padding.
        token_end: [R], the end of each row's tokens.
        attention: Of each group of layers.
        states: Of recurrent layers, where the shape has states.
        token_adapter: [T], the slot of each token's adapter, or -1; in a step with padding, where the shape has any.
    """

    tokens: Tensor
    position: Tensor
    cache_slots: tuple[Tensor, ...]
    token_end: Tensor
    attention: tuple[AttentionStep, ...]
    states: StateTensors | None = None
    token_adapter: Tensor | None = None

    def cut(self, start: int, stop: int) -> DerivedStep:
        """The pass over the tokens from ``start`` to ``stop`` alone, after those before them; rows are as they were."""
        part, size = slice(start, stop), stop - start
        attention = []
        for one in self.attention:
            first = (one.span_start - start).clamp(0, size)
            count = (one.span_start + one.span_count - start).clamp(0, size) - first
            tokens = {name: getattr(one, name)[part] for name in _PER_TOKEN}
            attention.append(replace(one, span_start=first, span_count=count, **tokens))
        return DerivedStep(
            tokens=self.tokens[part],
            position=self.position[part],
            cache_slots=tuple(slots[part] for slots in self.cache_slots),
            token_end=self.token_end,
            attention=tuple(attention),
        )


class Deriver:
    """Makes the tensors of a step from its input and the state.

    Args:
        shape: Of the steps.
        state: The sequences'. This object changes it by the input's differences, and by the tokens of steps.

    Attributes:
        shape: Of the steps.
        state: As given.
    """

    def __init__(self, shape: StepShape, state: SlotState) -> None:
        self.shape = shape
        self.state = state
        tables = len(state.shape.null_blocks)
        self._tables = [state.tensors[f"block_table_{i}"] for i in range(tables)]
        self._flat_tables = [table.view(-1) for table in self._tables]
        self._lengths = state.tensors["num_computed_tokens"]
        device = self._tables[0].device
        self._count_up = torch.arange(max(shape.max_tokens, shape.max_rows), dtype=torch.int32, device=device)
        self._no_tree = torch.full((shape.max_tokens,), NO_TREE, dtype=torch.int32, device=device)
        self._no_word = torch.zeros(shape.max_tokens, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)  # of no dimensions it would not widen the result

    def apply_updates(self, given: Tensors) -> None:
        """Take the differences that came with an input; before :meth:`derive`."""
        self.state.apply(given[UPDATE_WORD], given[UPDATE_VALUE])

    def derive(self, given: Tensors, num_tokens: int, *, is_padded: bool = True) -> DerivedStep:
        """What the model reads, and where it reads and writes the cache.

        Args:
            given: The input on the device.
            num_tokens: T of the bucket; the rows have no more.
            is_padded: False where the rows have just so many.
        """
        slot, count = given["slot"], given["num_tokens"]
        start = self._lengths.index_select(0, slot)
        token_end = count.cumsum(0, dtype=torch.int32)
        token_start = token_end - count
        token = self._count_up[:num_tokens]
        ends = token_end[:-1] if is_padded else token_end
        row = torch.searchsorted(ends, token, right=True, out_int32=True)
        # A row's tokens follow one another in the step and in the cache.
        place = token + (start - token_start).index_select(0, row)
        of_slot = slot.index_select(0, row)
        tokens = given["tokens"][:num_tokens]
        if is_padded:
            place = place.masked_fill(row >= self.shape.max_rows, 0)
        position, tree_first, tree_word = place, self._no_tree[:num_tokens], self._no_word[:num_tokens]
        if self.shape.has_trees:
            within = token - token_start.index_select(0, row)
            plain = (count - given["num_drafts"]).index_select(0, row)
            position, tree_first, tree_word = self._trees(given["parents"][:num_tokens], within, plain, place)
        size, width = self.state.shape.block_size, self.state.shape.max_blocks
        block = place // size
        entry, offset = torch.add(block, of_slot, alpha=width), torch.sub(place, block, alpha=size)
        # The padding slot's table is of null blocks.
        cache_slots = tuple(torch.add(offset, table.index_select(0, entry), alpha=size) for table in self._flat_tables)
        if is_padded:
            of_slot = of_slot.masked_fill(row >= self.shape.max_rows, -1)
        attention = tuple(
            AttentionStep(
                block_table=table,
                row=of_slot,
                place=place,
                position=position,
                tree_first=tree_first,
                tree_word=tree_word,
                span_row=slot,
                span_start=token_start,
                span_count=count,
            )
            for table in self._tables
        )
        states = token_adapter = None
        if is_padded and self.shape.has_adapters:
            token_adapter = given["adapter"].index_select(0, row)
        if self.shape.has_states:
            states = self._states(given, start, token_start, row, token, place)
            states = states if is_padded else states.read_ahead()
        return DerivedStep(
            tokens=tokens,
            position=position,
            cache_slots=cache_slots,
            token_end=token_end,
            attention=attention,
            states=states,
            token_adapter=token_adapter,
        )

    def _states(
        self, given: Tensors, start: Tensor, token_start: Tensor, row: Tensor, token: Tensor, place: Tensor
    ) -> StateTensors:
        """Rows and tokens as recurrent layers see them, of each row's length and first token, and each token's row."""
        slot, oldest, newest, oldest_after = given["states"]
        count, is_padding = given["num_tokens"], row >= self.shape.max_rows
        index = token - token_start.index_select(0, row)
        return StateTensors(
            slot=slot,
            start=token_start,
            count=count,
            length=start,
            oldest=oldest,
            newest=newest,
            oldest_after=oldest_after,
            token_slot=slot.index_select(0, row).masked_fill(is_padding, -1),
            token_index=index,
            token_position=place,
            token_left=count.index_select(0, row) - index,
        )

    def logit_tokens(self, given: Tensors, step: DerivedStep, num_logits: int) -> Tensor:
        """The token of each row of logits: int32 [N].

        Args:
            given: The input on the device.
            step: What :meth:`derive` made of it.
            num_logits: N, what the rows want.
        """
        logit_end = given["num_logits"].cumsum(0, dtype=torch.int32)
        logit = self._count_up[:num_logits]
        row = torch.searchsorted(logit_end[:-1], logit, right=True, out_int32=True)
        # A row's logits end where its tokens do.
        return logit + (step.token_end - logit_end).index_select(0, row)

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

    def advance_all(self, given: Tensors) -> None:
        """Move the state past a step by all tokens of all rows; what is not kept of them the host says anew."""
        self._lengths.index_add_(0, given["slot"], given["num_tokens"])
