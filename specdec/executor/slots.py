"""The state of sequences on the device, by slot: a sequence has one from its first step until it holds nothing.

The host has a copy of what it has set itself, and sends differences. The device advances lengths by each step's tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.executor.staging import Arrays, Field, Layout, Tensors

Key = TypeVar("Key", bound=Hashable)

UPDATE_WORD, UPDATE_VALUE = "update_word", "update_value"
"""Fields of a step's input: differences, as words of the state and what they become."""


@dataclass(frozen=True)
class SlotShape:
    """How much state there is.

    Attributes:
        num_slots: Most sequences at once.
        block_size: Positions of a block of the cache.
        max_blocks: Blocks of the longest sequence.
        null_blocks: For each group of layers the block that takes what padding writes.
    """

    num_slots: int
    block_size: int
    max_blocks: int
    null_blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("num_slots", "block_size", "max_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.null_blocks:
            raise ValueError("null_blocks must name a block for each group of layers, got none")

    @property
    def padding_slot(self) -> int:
        """The slot of rows that are not there, one beyond the others."""
        return self.num_slots

    @cached_property
    def layout(self) -> Layout:
        """The state as fields, [num_slots + 1, ..] each.

        - ``num_computed_tokens``: int32, tokens in the cache, which is the next token's position.
        - ``block_table_0``, ..: int32 [.., max_blocks], one for each group of layers.
        - ``no_word``: int32 [1], takes differences that are not there.
        """
        slots = self.num_slots + 1
        tables = [Field(f"block_table_{i}", (slots, self.max_blocks)) for i in range(len(self.null_blocks))]
        return Layout((Field("num_computed_tokens", (slots,)), *tables, Field("no_word", (1,))))

    def initial(self) -> NDArray[np.int32]:
        """int32 [num_words]: what every slot holds before it is first set. Its tables are of null blocks."""
        words = np.zeros(self.layout.num_words, np.int32)
        arrays = self.layout.arrays(words)
        for i, block in enumerate(self.null_blocks):
            arrays[f"block_table_{i}"][:] = block
        return words


class SlotTable(Generic[Key]):
    """Which sequence has which slot, on the host.

    A freed slot may be taken at once: what its new sequence sets is uploaded behind the steps that know the old one.

    Args:
        num_slots: Most sequences at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = [*reversed(range(num_slots))]
        self._slot_of: dict[Key, int] = {}

    @property
    def num_free(self) -> int:
        """Slots that are left."""
        return len(self._free)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_of

    def __iter__(self) -> Iterator[Key]:
        return iter(self._slot_of)

    def __getitem__(self, key: Key) -> int:
        """The slot of a sequence that has one."""
        return self._slot_of[key]

    def num_missing(self, keys: Iterable[Key]) -> int:
        """How many of some sequences have no slot."""
        slot_of = self._slot_of
        return sum([key not in slot_of for key in keys])

    def all_of(self, keys: Iterable[Key]) -> list[int]:
        """The slots of some sequences; those that have none take one."""
        slot_of = self._slot_of
        return [slot_of[key] if key in slot_of else self.take(key) for key in keys]

    def take(self, key: Key) -> int:
        """A slot for a sequence.

        Raises:
            ValueError: the sequence has one.
            RuntimeError: none is free.
        """
        if key in self._slot_of:
            raise ValueError(f"{key!r} has slot {self._slot_of[key]}")
        if not self._free:
            raise RuntimeError(f"all {len(self._slot_of)} slots are taken")
        slot = self._slot_of[key] = self._free.pop()
        return slot

    def give_back(self, key: Key) -> int:
        """Free a sequence's slot; gives its number."""
        slot = self._slot_of.pop(key)
        self._free.append(slot)
        return slot


class SlotUpdates:
    """What the host has set and not yet sent. The last value counts where one is set twice.

    Args:
        shape: Of the state.
    """

    def __init__(self, shape: SlotShape) -> None:
        layout = shape.layout
        self._words = shape.initial()
        self._arrays = layout.arrays(self._words)
        self._fields = {field.name: (field, layout.offsets[field.name]) for field in layout.fields}
        self._no_word = layout.offsets["no_word"]
        self._num_slots = shape.num_slots
        self._pending: list[NDArray[np.int64]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be sent."""
        return not self._pending

    def set_lengths(self, slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Say how many tokens are in the cache.

        Args:
            slots: [S], which slots.
            lengths: [S], of each.

        Raises:
            IndexError: a slot is not in the state.
        """
        if slots.size and not 0 <= slots.min() <= slots.max() < self._num_slots:
            raise IndexError(f"slots must be in [0, {self._num_slots}), got {slots.min()} to {slots.max()}")
        self._arrays["num_computed_tokens"][slots] = lengths
        self._pending.append(self._fields["num_computed_tokens"][1] + slots)

    def set_blocks(self, group: int, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Set a stretch of a slot's block table.

        Args:
            group: Of layers.
            slot: Which slot.
            first: The first entry.
            blocks: What the entries from there on become.

        Raises:
            IndexError: it is not within the table.
        """
        field, offset = self._fields[f"block_table_{group}"]
        width = field.shape[1]
        if not (0 <= slot < self._num_slots and first >= 0 and first + len(blocks) <= width):
            raise IndexError(
                f"slot {slot} must be in [0, {self._num_slots}), and entries {first} to {first + len(blocks)} within "
                f"[0, {width}]"
            )
        self._arrays[f"block_table_{group}"][slot, first : first + len(blocks)] = blocks
        start = offset + slot * width + first
        self._pending.append(np.arange(start, start + len(blocks)))

    def stage(self, arrays: Arrays) -> int:
        """Write pending differences into a step's input, and fill up with such as change nothing.

        Args:
            arrays: With ``update_word`` and ``update_value``, int32 [U].

        Returns:
            How many did not fit. They stay pending; the step must wait for another upload, applied before it.
        """
        words = arrays[UPDATE_WORD]
        at = np.unique(np.concatenate(self._pending)) if self._pending else np.zeros(0, np.int64)
        n = min(len(at), len(words))
        words[:n], words[n:] = at[:n], self._no_word
        arrays[UPDATE_VALUE][:n] = self._words[at[:n]]
        self._pending = [at[n:]] if n < len(at) else []
        return len(at) - n


class SlotState:
    """The state on the device. Its tensors stay where they are.

    Args:
        shape: How much there is.
        device: Where.

    Attributes:
        shape: How much there is.
        tensors: The fields of :attr:`SlotShape.layout`.
    """

    def __init__(self, shape: SlotShape, device: torch.device) -> None:
        self.shape = shape
        self._words = torch.from_numpy(shape.initial()).to(device)
        self.tensors: Tensors = shape.layout.tensors(self._words)

    def apply(self, words: Tensor, values: Tensor) -> None:
        """Take differences of all fields by one scatter.

        Args:
            words: int32 [U], each but ``no_word`` once.
            values: int32 [U].
        """
        self._words.index_put_((words,), values)
