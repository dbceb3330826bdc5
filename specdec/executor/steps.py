"""The steps of a runner on the device: one upload brings a step's rows, and everything else is derived there.

A sequence has a slot from its first step until it holds nothing, and its block table goes there as differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.cache.blocks import BlockPool, CachedSequence
from specdec.executor.derive import DerivedStep, Deriver, StepShape, lay_out
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.slots import SlotShape, SlotState, SlotTable, SlotUpdates
from specdec.executor.staging import Staging, Tensors, num_words_of
from specdec.kernels.attention import GroupStep, StepBounds

_MIN_SLOTS, _MIN_BLOCKS, _MIN_TOKENS = 8, 16, 16
_UNKNOWN = -1
_UNREAD = -2
"""The first number that is neither a token nor -1, which is none."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """A step's rows on the host, int64 [R] each.

    Attributes:
        tokens: int32 [T], all rows' behind one another.
        num_tokens: Of each row, at least 1.
        num_cached: How many tokens come before them.
        num_logits: How many of the last ones want logits.
        parents: By index the rows that end with a tree; see :class:`specdec.executor.rows.RowInput`.
        states: [4, R], each row's recurrent state; see :attr:`specdec.executor.derive.StepShape.layout`.
        adapters: [R], slots of the rows' adapters, -1 for none; None where no row uses one.
        num_passes: [R], how many passes each row has a part in, a token in each but the first; None for a step of one.
    """

    tokens: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    num_cached: NDArray[np.int64]
    num_logits: NDArray[np.int64]
    parents: Mapping[int, Sequence[int]]
    states: NDArray[np.int64] | None = None
    adapters: NDArray[np.int64] | None = None
    num_passes: NDArray[np.int64] | None = None

    @property
    def lengths_after(self) -> NDArray[np.int64]:
        """How many tokens the device has of each row behind the last pass."""
        after = self.num_cached + self.num_tokens
        return after if self.num_passes is None else after + self.num_passes - 1


def unread(place: int) -> int:
    """What stands for a token that is on the device alone, the one at ``place`` among those drawn there."""
    return _UNREAD - place


@torch.inference_mode()
def put_drawn(tokens: Tensor, drawn: Tensor) -> None:
    """Put drawn tokens in the place of what stands for them.

    Args:
        tokens: int32 [T], on the device.
        drawn: int32 [D], there.
    """
    place = (_UNREAD - tokens).clamp(min=0, max=len(drawn) - 1)
    tokens.copy_(torch.where(tokens <= _UNREAD, drawn.index_select(0, place), tokens))


class Steps:
    """Brings steps to the device.

    Without limits, memory grows by doubling with the largest step, and the most and longest sequences.

    Args:
        pool: The blocks.
        device: Where steps are derived.
        limits: The largest step, for memory that stays where it is.
        has_states: Whether rows have recurrent states that the device is to know, in a step with padding.
        tile_tokens: Steps are filled up to a multiple of so many tokens.
        has_adapters: The same of adapters.

    Attributes:
        staging: The newest shape's.
    """

    def __init__(
        self,
        pool: BlockPool,
        device: torch.device,
        limits: ExecutorLimits | None = None,
        has_states: bool = False,
        tile_tokens: int = 1,
        has_adapters: bool = False,
    ) -> None:
        self._pool, self._device, self._limits, self._tile_tokens = pool, device, limits, tile_tokens
        self._null_blocks = tuple(group.null_block for group in pool.groups)
        self._has_updates = False
        self._num_extra = 0 if limits is None else limits.num_extra_words
        if limits is None:
            self._make_state(_MIN_SLOTS, _MIN_BLOCKS)
            self._make_step(_step_shape(_MIN_SLOTS, _MIN_TOKENS))
        else:
            # Sequences that wait for their turn keep their slots as long as nobody else wants them.
            self._make_state(2 * limits.max_rows, pool.blocks_for(limits.max_length) + 1)
            max_tokens = max(limits.max_tokens, limits.graph_sizes[-1])
            shape = _step_shape(limits.max_rows, max_tokens, limits.has_trees)
            has_chains = limits.num_chained_passes > 0
            self._make_step(replace(shape, has_states=has_states, has_adapters=has_adapters, has_chains=has_chains))

    @property
    def bounds(self) -> StepBounds:
        """The largest step until memory grows."""
        shape, state = self._shape, self._state.shape
        length = state.max_blocks * state.block_size
        return StepBounds(state.block_size, shape.max_tokens, shape.max_rows, length, shape.has_trees)

    def release(self, sequence: CachedSequence) -> None:
        """Free the slot of a sequence that holds nothing any more, if it has one."""
        if sequence in self._slots:
            self._slots.give_back(sequence)

    def begin(
        self,
        sequences: Sequence[CachedSequence],
        rows: StepRows,
        drawn: Tensor | None = None,
        extra: Sequence[NDArray[Any]] = (),
    ) -> tuple[DerivedStep, Sequence[Tensor] | None]:
        """Upload a step, and derive its tokens. Waits for nothing on the device.

        Args:
            sequences: Of each row, none twice, with room for its tokens.
            rows: The rows.
            drawn: int32 [D], on the device, tokens that rows name by :func:`unread`.
            extra: Arrays that go along.

        Returns:
            The step, and ``extra`` on the device, until the next upload; None where there is no room for it.

        Raises:
            ValueError: the step is larger than the limits.
        """
        with self.sent_anew_on_failure():
            sent = self.upload(sequences, rows, drawn, extra)
            return self.derive(len(rows.tokens), is_padded=False), sent

    def upload(
        self,
        sequences: Sequence[CachedSequence],
        rows: StepRows,
        drawn: Tensor | None = None,
        extra: Sequence[NDArray[Any]] = (),
    ) -> Sequence[Tensor] | None:
        """The first half of :meth:`begin`."""
        num_blocks, num_extra = -(-rows.lengths_after // self._pool.block_size), num_words_of(extra)
        self._make_room(sequences, rows, int(num_blocks.max()), num_extra)
        slots = np.array(self._slots.all_of(sequences))
        num_sent = np.array([sequence.num_sent for sequence in sequences])
        for row in np.flatnonzero(num_sent < num_blocks).tolist():
            sequence, first, needed = sequences[row], int(num_sent[row]), int(num_blocks[row])
            for group, table in enumerate(sequence.tables):
                self._updates.set_blocks(group, int(slots[row]), first, table[first:needed])
            sequence.num_sent = needed
        self._set_lengths(slots, rows)
        has_room = num_extra <= self.staging.num_extra_words
        sent = self._lay_out(slots, rows, extra if has_room else ())
        if drawn is not None:
            put_drawn(self.staging.tensors["tokens"][: len(rows.tokens)], drawn)
        return sent if has_room else None

    def padded(self, rows: StepRows) -> int:
        """Tokens of a step, filled up to whole tiles."""
        return -(-len(rows.tokens) // self._tile_tokens) * self._tile_tokens

    def derive(self, num_tokens: int, *, is_padded: bool = True, given: Tensors | None = None) -> DerivedStep:
        """The second half: what the device makes of the newest upload.

        Args:
            num_tokens: Of the step, padding included.
            is_padded: False where there is none.
            given: What it was given in place of the upload, whose differences it has taken.
        """
        if given is None:
            given = self.staging.tensors
            if self._has_updates:
                self._deriver.apply_updates(given)
        step = self._deriver.derive(given, num_tokens, is_padded=is_padded)
        self._deriver.advance_all(given)
        return step

    @contextmanager
    def sent_anew_on_failure(self) -> Iterator[None]:
        """Around :meth:`upload` and :meth:`derive`: if one fails, what the device has of the step is not known."""
        try:
            yield
        except Exception:
            self.forget()
            raise

    def forget(self) -> None:
        """What the device has of sequences is sent anew with their next step."""
        self._lengths[:] = _UNKNOWN
        for sequence in self._slots:
            sequence.num_sent = 0

    def upload_nothing(self, extra: Sequence[NDArray[Any]] = ()) -> Sequence[Tensor]:
        """Upload a step that is padding alone; gives ``extra`` on the device."""
        none = np.zeros(0, np.int64)
        return self._lay_out(none, StepRows(none.astype(np.int32), none, none, none, {}), extra)

    def _lay_out(
        self, slots: NDArray[np.int64], rows: StepRows, extra: Sequence[NDArray[Any]] = ()
    ) -> Sequence[Tensor]:
        num_drafts = np.zeros(len(slots), np.int64)
        for row, parents in rows.parents.items():
            num_drafts[row] = len(parents)
        arrays = self.staging.begin()
        # A graph always takes some.
        self._has_updates = self._limits is not None or not self._updates.is_empty
        while self._has_updates and self._updates.stage(arrays):
            self.staging.upload()
            self._deriver.apply_updates(self.staging.tensors)
            arrays = self.staging.begin()
        lay_out(
            self._shape,
            arrays,
            self._state.shape.padding_slot,
            slots=slots,
            num_tokens=rows.num_tokens,
            num_drafts=num_drafts,
            num_logits=rows.num_logits,
            tokens=rows.tokens,
            parents=rows.parents,
            states=rows.states,
            adapters=rows.adapters,
            num_passes=rows.num_passes,
            is_checked=not rows.parents,
        )
        return self.staging.upload(extra)

    def _set_lengths(self, slots: NDArray[np.int64], rows: StepRows) -> None:
        """Say how long sequences are that were cut back, or are new, since the device has moved them on."""
        is_other = self._lengths[slots] != rows.num_cached
        if is_other.any():
            self._updates.set_lengths(slots[is_other], rows.num_cached[is_other])
        self._lengths[slots] = rows.lengths_after

    def logit_tokens(self, step: DerivedStep, num_logits: int) -> Tensor:
        """The tokens of the newest step whose logits are wanted: int32 [num_logits]."""
        return self._deriver.logit_tokens(self.staging.tensors, step, num_logits)

    def by_group(self, step: DerivedStep) -> list[GroupStep]:
        """A step as each group of layers sees it."""
        size = self._pool.block_size
        return [GroupStep(*one, size) for one in zip(step.attention, step.cache_slots, strict=True)]

    def _make_room(self, sequences: Sequence[CachedSequence], rows: StepRows, num_blocks: int, num_extra: int) -> None:
        """See to it that a step fits, and ``num_extra`` words with it where memory may grow."""
        state, shape = self._state.shape, self._shape
        num_new = self._slots.num_missing(sequences)
        num_rows, num_tokens = max(shape.max_rows, len(sequences)), max(shape.max_tokens, self.padded(rows))
        has_trees = shape.has_trees or bool(rows.parents)
        is_too_small = (num_rows, num_tokens, has_trees) != (shape.max_rows, shape.max_tokens, shape.has_trees)
        if self._limits is not None:
            if is_too_small or num_blocks > state.max_blocks:
                raise ValueError(f"a step must be within {self._limits}, got {len(sequences)} rows")
            self._free_slots(num_new, sequences)
            return
        if num_new > self._slots.num_free or num_blocks > state.max_blocks:
            num_slots = max(state.num_slots, _power_of_two(len(self._slots) + num_new))
            held = list(self._slots)
            self._make_state(num_slots, max(state.max_blocks, _power_of_two(num_blocks)))
            for sequence in held:
                sequence.num_sent = 0
        if num_extra > self._num_extra:
            self._num_extra, is_too_small = _power_of_two(num_extra), True
        if is_too_small:
            self._make_step(_step_shape(_power_of_two(num_rows), _power_of_two(num_tokens), has_trees))
        elif self._deriver.state is not self._state:
            self._make_step(shape)

    def _free_slots(self, count: int, sequences: Sequence[CachedSequence]) -> None:
        """Make so many slots free, of sequences that are not in this step; those that had them longest go first."""
        if count <= self._slots.num_free:
            return
        stays = {id(sequence) for sequence in sequences}
        for other in [one for one in self._slots if id(one) not in stays]:
            if count <= self._slots.num_free:
                return
            self._slots.give_back(other)
            other.num_sent = 0

    def _make_state(self, num_slots: int, max_blocks: int) -> None:
        """Memory for sequences; none has a slot yet."""
        shape = SlotShape(num_slots, self._pool.block_size, max_blocks, self._null_blocks)
        self._state = SlotState(shape, self._device)
        self._slots = SlotTable[CachedSequence](num_slots)
        self._updates = SlotUpdates(shape)
        self._lengths = np.zeros(num_slots, np.int64)  # as the device has them

    def _make_step(self, shape: StepShape) -> None:
        staging = Staging(shape.layout, self._device, num_extra_words=self._num_extra)
        deriver = Deriver(shape, self._state)
        self._shape, self.staging, self._deriver = shape, staging, deriver


def _step_shape(num_rows: int, num_tokens: int, has_trees: bool = False) -> StepShape:
    return StepShape(num_rows, num_tokens, 128 + 4 * num_rows, has_trees)


def _power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()
