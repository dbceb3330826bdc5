"""How often each token stands in an output, by slot where rows are sampled: a step sends what is new of a log.

A sequence with penalties has a slot from its first row until its parameters are gone, or the slot is taken by others.
What it counts is compared with the log token by token, so nothing rests on how it was found.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import TokenArray, TokenBuffer, as_array, common_prefix_length
from specdec.sampling.rows import RowGroup, max_slice_rows

_LEAST_SLOTS = 8
_BITS = 32
_NO_TOKENS = as_array(())
_Key = tuple[int, int]
"""The id of a sequence's parameters, and a number: it is 0, but for logs that begin with another prompt."""


class Changes(NamedTuple):
    """Differences of the counts on the device.

    Attributes:
        cleared: int64 [C], slots that begin anew.
        prompt_bits: int32 [C, ceil(V / 32)], the tokens of their prompts.
        at: int64 [U], places in the counts, which lie row by row.
        by: int32 [U], what is added there.
    """

    cleared: NDArray[np.int64]
    prompt_bits: NDArray[np.int32]
    at: NDArray[np.int64]
    by: NDArray[np.int32]


class CountedGroups(NamedTuple):
    """What is counted of some groups.

    Attributes:
        slots: int32 [R], each group's; -1 for none.
        ahead: Of each group the tokens before its first row that its slot does not count.
        changes: For the device, before any of its slots is read.
    """

    slots: NDArray[np.int32]
    ahead: list[TokenArray]
    changes: Changes


@dataclass(slots=True)
class _Slot:
    number: int
    owner: weakref.ref[SequenceSpec]
    counted: TokenBuffer


class TokenCounts:
    """The counts, and what of each log they hold.

    Args:
        vocab_size: V; other tokens are not counted.
        device: Where rows are sampled.
        max_slots: Slots beyond which those unused for longest are given to others: as many as there may be sequences
            in a slice of logits, by default. A step with more has more.

    Attributes:
        counts: int32 [slots, V], how often each token stands in the counted part of an output.
        prompt_bits: int32 [slots, ceil(V / 32)], which tokens are in a prompt, where repetition is penalized.
    """

    def __init__(self, vocab_size: int, device: torch.device, max_slots: int | None = None) -> None:
        self._vocab_size, self.device = vocab_size, device
        self._num_words = -(-vocab_size // _BITS)
        self._max_slots = max_slice_rows(vocab_size) if max_slots is None else max_slots
        self._slots: OrderedDict[_Key, _Slot] = OrderedDict()
        self._free: list[int] = []
        self._num_behind = 0
        no_bits = np.zeros((0, self._num_words), np.int32)
        self._no_changes = Changes(np.zeros(0, np.int64), no_bits, np.zeros(0, np.int64), np.zeros(0, np.int32))
        with torch.inference_mode(False):
            self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
            self.prompt_bits = torch.zeros(0, self._num_words, dtype=torch.int32, device=device)

    def begin_step(self) -> None:
        """A step begins; if one before it has failed, the device may not have had its changes."""
        if self._num_behind:
            self._forget()

    def counted(self, groups: Sequence[RowGroup]) -> CountedGroups:
        """Bring the slots of groups with penalties to their logs; :meth:`apply` comes next, once for each call.

        A slot counts what all groups of a sequence have in common, such as a drafter's branches.
        """
        users = _users(groups)
        slots, ahead, changes = self.none_counted(len(groups))
        if not users:
            return CountedGroups(slots, ahead, changes)
        self._num_behind += 1
        self._make_room(users)
        cleared, prompts = list[int](), list[NDArray[np.int32]]()
        at, by = list[NDArray[np.int64]](), list[NDArray[np.int32]]()
        for key, own in users.items():
            spec, tokens = groups[own[0]].spec, as_array(groups[own[0]].tokens)
            length = min((common_prefix_length(tokens, groups[i].tokens) for i in own[1:]), default=len(tokens))
            slot = self._slots.get(key)
            kept = 0 if slot is None else common_prefix_length(slot.counted.array, tokens[:length])
            if slot is None or slot.owner() is not spec or kept < spec.output_start:
                number = self._free.pop() if slot is None else slot.number
                kept = spec.output_start
                slot = _Slot(number, weakref.ref(spec), TokenBuffer(tokens[:kept]))
                self._slots[key] = slot
                cleared.append(number)
                prompts.append(self._prompt_bits(tokens[:kept], spec.sampling))
            self._slots.move_to_end(key)
            for part, change in ((slot.counted.array[kept:], -1), (tokens[kept:length], 1)):
                known = part[(part >= 0) & (part < self._vocab_size)]
                at.append(known + np.int64(slot.number * self._vocab_size))
                by.append(np.full(len(known), change, np.int32))
            slot.counted.truncate(kept)
            slot.counted.extend(tokens[kept:length])
            for i in own:
                slots[i], ahead[i] = slot.number, as_array(groups[i].tokens[length:])
        changes = Changes(
            np.array(cleared, np.int64),
            np.array(prompts, np.int32).reshape(-1, self._num_words),
            np.concatenate(at),
            np.concatenate(by),
        )
        return CountedGroups(slots, ahead, changes)

    def none_counted(self, num_groups: int) -> CountedGroups:
        """Of groups without penalties."""
        return CountedGroups(np.full(num_groups, -1, np.int32), [_NO_TOKENS] * num_groups, self._no_changes)

    def apply(self, cleared: Tensor, prompt_bits: Tensor, at: Tensor, by: Tensor) -> None:
        """Take differences, which are on the device by now; see :class:`Changes`."""
        if len(cleared):
            self.counts.index_fill_(0, cleared, 0)
            self.prompt_bits.index_copy_(0, cleared, prompt_bits)
        self.counts.view(-1).index_add_(0, at, by)
        self._num_behind -= 1

    def _make_room(self, users: dict[_Key, list[int]]) -> None:
        """See to it that there is a free slot for each that has none."""
        num_new = sum(key not in self._slots for key in users)
        if num_new > len(self._free):
            for key in [key for key, slot in self._slots.items() if slot.owner() is None and key not in users]:
                self._free.append(self._slots.pop(key).number)
        num_needed, num_slots = num_new + len(self._slots), len(self.counts)
        if num_new > len(self._free) and num_slots < max(self._max_slots, len(users)):
            most = max(min(max(2 * num_needed, _LEAST_SLOTS), self._max_slots), len(users))
            with torch.inference_mode(False):  # heads draft in that mode, and what is made in it cannot change after
                grown = self.counts.new_zeros(most, self._vocab_size), self.prompt_bits.new_zeros(most, self._num_words)
                for new, old in zip(grown, (self.counts, self.prompt_bits), strict=True):
                    new[:num_slots] = old
            self.counts, self.prompt_bits = grown
            self._free += range(num_slots, most)
        for key in list(self._slots):
            if num_new <= len(self._free):
                break
            if key not in users:
                self._free.append(self._slots.pop(key).number)

    def _forget(self) -> None:
        self._slots.clear()
        self._num_behind = 0
        self._free = [*range(len(self.counts))]

    def _prompt_bits(self, prompt: TokenArray, params: SamplingParams) -> NDArray[np.int32]:
        is_listed = (prompt >= 0) & (prompt < self._vocab_size) & (params.repetition_penalty != 1)
        return bits_of(prompt[is_listed], self._vocab_size)


def uses_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def bits_of(tokens: Sequence[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """A set of tokens as int32 [ceil(V / 32)], a bit for each."""
    bits = np.zeros(-(-vocab_size // _BITS) * _BITS, np.uint8)
    bits[np.asarray(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _users(groups: Sequence[RowGroup]) -> dict[_Key, list[int]]:
    """The groups with penalties, those together that are of a sequence and begin with the same prompt."""
    users: dict[_Key, list[int]] = {}
    for i, group in enumerate(groups):
        if not uses_penalties(group.spec.sampling):
            continue
        number, start = 0, group.spec.output_start
        while own := users.get((id(group.spec), number)):
            if np.array_equal(groups[own[0]].tokens[:start], group.tokens[:start]):
                break
            number += 1
        users.setdefault((id(group.spec), number), []).append(i)
    return users
