"""Steps that are decided by kernels: all arrays go to the device at once, and one record comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.params import SequenceSpec
from specdec.executor.staging import Field, Layout, Record, Uploads
from specdec.executor.steps import put_drawn
from specdec.kernels.sample import NUM_ACCEPTED, NUM_FIXED, SampleStep, record_width
from specdec.sampling.edits import Editor, Edits
from specdec.sampling.logprobs import entries_of, logprob_numbers
from specdec.sampling.parameters import BAD_WORDS, LOGPROBS, MIN_TOKENS, NOISE, PENALTIES, TRUNCATION
from specdec.sampling.rows import LogprobReport, RowGroup, Rows, VerifiedRun
from specdec.sampling.token_counts import Changes, TokenCounts

_LEAST_CAPABILITY = (8, 0)
_NOBODY = np.zeros(0, np.int64)


def runs_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: CUDA from compute capability 8.0, with Triton."""
    return device.type == "cuda" and _can_run(device)


@cache
def _can_run(device: torch.device) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


class LaidOut(NamedTuple):
    """A step as kernels are given it, on the host.

    Attributes:
        rows: Its rows.
        arrays: What has to be on the device.
        options: What is used at all, by the names of ``TritonSampler.decide``.
        asking: Numbers of the groups that ask for log probabilities.
    """

    rows: Rows
    arrays: list[NDArray[Any]]
    options: dict[str, bool]
    asking: list[int]


class _Newest(NamedTuple):
    """The newest step that was laid out by nothing but parameters, positions and drafts.

    Attributes:
        specs: Of its groups.
        counts: Rows of each.
        arrays: As in :class:`LaidOut`.
        options: The same.
        asking: The same.
    """

    specs: list[SequenceSpec]
    counts: list[int]
    arrays: list[NDArray[Any]]
    options: dict[str, bool]
    asking: list[int]

    def is_like(self, rows: Rows, specs: Sequence[SequenceSpec]) -> bool:
        """Whether a step has the same groups, and rows of each."""
        return self.counts == rows.counts and all(map(is_, specs, self.specs))


class StagedStep(NamedTuple):
    """What kernels are given of a step.

    Attributes:
        step: Its arrays, on the device.
        options: What is used at all, by the names of ``TritonSampler.decide``.
        asking: int64 [G], numbers of the groups that ask for log probabilities.
    """

    step: SampleStep
    options: dict[str, bool]
    asking: Tensor


class KernelSampler:
    """Decides steps by kernels; its buffers grow by doubling with the largest step.

    Args:
        vocab_size: V.
        editor: Lays out edits, for the device where rows are sampled.
    """

    def __init__(self, vocab_size: int, editor: Editor) -> None:
        self._vocab_size, self._device, self.editor = vocab_size, editor.device, editor
        self._sizes = self._room = 0, 0, 0
        self._kernels: Any = None
        self._record: Record | None = None
        self._uploads = Uploads(editor.device)
        self._newest: dict[int, _Newest | None] = {}
        self._staged: tuple[Tensor, SampleStep] | None = None

    @property
    def vocab_size(self) -> int:
        """As given."""
        return self._vocab_size

    def sample(self, logits: Tensor, laid_out: LaidOut, sent: Sequence[Tensor] | None = None) -> Tensor:
        """The target's token for every row: int32 [N], overwritten by the next step.

        Args:
            logits: [N, at least V], as the model gave them; not changed.
            laid_out: The step.
            sent: Its arrays on the device; None brings them there by a transfer of their own.
        """
        self._make_room([laid_out])
        self._decide(logits, self.staged(laid_out, sent))
        return self._chosen(laid_out.rows)

    def score(self, logits: Tensor, laid_out: LaidOut, sent: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The same, and by what they were chosen, with noise: float32 [N, V]."""
        scores = torch.empty(laid_out.rows.num_rows, self._vocab_size, device=self._device)
        self._make_room([laid_out])
        self._decide(logits, self.staged(laid_out, sent), scores)
        return self._chosen(laid_out.rows), scores

    def launch(
        self,
        logits: Tensor,
        parts: Sequence[LaidOut],
        sent: Sequence[Tensor] | None,
        flags: Tensor | None,
        drawn: Tensor | None = None,
    ) -> Launched:
        """Put a step's decisions, and one copy of all that is told of them, in the device's queue.

        Args:
            logits: As above.
            parts: The step; what is decided at once takes memory.
            sent: Their arrays on the device; None brings them there by a transfer of their own.
            flags: bool [F], on the device, to be brought along.
            drawn: int32 [D], there, the tokens that drafts name by :func:`specdec.executor.steps.unread`.
        """
        groups = [group for part in parts for group in part.rows.groups]
        starts = [*accumulate((len(part.rows.groups) for part in parts), initial=0)]
        asking = [start + i for start, part in zip(starts, parts, strict=False) for i in part.asking]
        num_top = [groups[i].spec.sampling.logprobs or 0 for i in asking]
        most = max((1 + len(groups[i].draft) for i in asking), default=0)
        sent = self._sent([values for part in parts for values in part.arrays], sent)
        self._make_room(parts)
        width = 2 + 2 * min(max(2, *num_top, 0), self._vocab_size)
        num_flags = 0 if flags is None else len(flags)
        record = self._begin_record(len(groups), num_flags, len(asking) * most * width)
        while record.num_under_way:
            record.collect()  # of a step that failed, or was given up
        array = row = number = 0
        for start, part in zip(starts, parts, strict=False):
            rows, staged = part.rows, self.staged(part, sent[array : array + len(part.arrays)])
            of_part = logits[row : row + rows.num_rows]
            decided = record.tensors["decided"][start : start + len(rows.groups)]
            if drawn is not None:
                put_drawn(staged.step.draft, drawn)
            self._decide(of_part, staged, record=decided)
            if part.asking:
                numbers = self._logprobs(of_part, staged, decided, most, max(num_top)).view(-1)
                record.tensors["numbers"][number : number + len(numbers)].copy_(numbers)
                number += len(numbers)
            array, row = array + len(part.arrays), row + rows.num_rows
        if flags is not None:
            record.tensors["flags"][:num_flags].copy_(flags)
        # Numbers come last, and are not copied where nobody asks.
        record.download(None if asking else record.layout.offsets["numbers"])
        return Launched(record, groups, self._sizes[2], asking, num_top, (len(asking), most, width), num_flags)

    def lay_out(self, rows: Rows, part: int = 0) -> LaidOut:
        """Lay a step out, before its logits are known.

        Args:
            rows: Its rows; groups with a grammar have their masks.
            part: Which of a step's parts they are, where it has several: they are laid out in order.
        """
        specs = [group.spec for group in rows.groups]
        is_plain = not any(group.mask is not None or group.parents for group in rows.groups)
        newest = self._newest.get(part) if is_plain else None
        if newest is not None and newest.is_like(rows, specs):
            by_row = newest.arrays[0].copy()
            by_row[_POSITION, : rows.num_rows], by_row[_DRAFT, : rows.num_rows] = rows.position_array(), rows.drafts()
            return LaidOut(rows, [by_row, *newest.arrays[1:]], newest.options, newest.asking)
        edits = self.editor.lay_out(rows, goes_on=part > 0)
        features = edits.features
        options = {
            "penalties": bool(features & PENALTIES),
            "truncation": bool(features & TRUNCATION),
            "noise": bool(features & NOISE),
        }
        asking = np.flatnonzero(edits.parameters["features"] & LOGPROBS) if features & LOGPROBS else _NOBODY
        arrays = [*_laid_out(rows, edits), asking, *edits.changes]
        laid_out = LaidOut(rows, arrays, options, asking.tolist())
        is_plain = is_plain and not features & (PENALTIES | MIN_TOKENS | BAD_WORDS)
        self._newest[part] = _Newest(specs, rows.counts, *laid_out[1:]) if is_plain else None
        return laid_out

    def staged(self, laid_out: LaidOut, sent: Sequence[Tensor] | None = None) -> StagedStep:
        """A step that is on the device, until the next one is; by a transfer of its own where none has brought it."""
        sent = self._sent(laid_out.arrays, sent)
        counts = self.editor.token_counts
        *arrays, asking = sent[: -len(Changes._fields)]
        if laid_out.options["penalties"]:
            counts.apply(*sent[-len(Changes._fields) :])
        if self._staged is None or self._staged[0] is not sent[0] or self._staged[1].counts is not counts.counts:
            self._staged = sent[0], on_device_as(arrays, counts)
        return StagedStep(self._staged[1], laid_out.options, asking)

    def _sent(self, arrays: Sequence[NDArray[Any]], sent: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Arrays on the device, where they may be already."""
        is_there = sent is not None and sent[0].device == self._device
        return sent if sent is not None and is_there else self._uploads.send(arrays)

    def _decide(
        self, logits: Tensor, staged: StagedStep, scores: Tensor | None = None, record: Tensor | None = None
    ) -> None:
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches there
            self._kernels.decide(logits, staged.step, scores=scores, record=record, **staged.options)

    def _chosen(self, rows: Rows) -> Tensor:
        chosen: Tensor = self._kernels.chosen[: rows.num_rows]
        return chosen

    def _logprobs(self, logits: Tensor, staged: StagedStep, record: Tensor, most: int, num_top: int) -> Tensor:
        """What to report of the tokens of records; of those that are not there anything.

        Args:
            logits: Of all rows.
            staged: The groups.
            record: What was decided of each.
            most: Tokens of each.
            num_top: See :func:`logprob_numbers`.
        """
        decided = record.index_select(0, staged.asking)
        width = self._sizes[2]
        tokens, path = decided[:, NUM_FIXED:][:, :most], decided[:, NUM_FIXED + width :][:, : most - 1]
        first = staged.step.first.index_select(0, staged.asking).long().unsqueeze(1)
        of_token = torch.cat((first, first + 1 + path), 1)
        return logprob_numbers(
            logits[:, : self._vocab_size], of_token.reshape(-1), tokens.clamp(min=0).long().reshape(-1), num_top
        )

    def _make_room(self, parts: Sequence[LaidOut]) -> None:
        of_parts = [(rows.num_rows, len(rows.groups), max(rows.counts)) for rows, *_ in parts]
        needed = max(one[0] for one in of_parts), max(one[1] for one in of_parts), max(one[2] for one in of_parts)
        if not _holds(self._sizes, needed):
            from specdec.kernels.triton.sample import TritonSampler

            self._sizes, self._room = _doubled(self._sizes, needed), (0, 0, 0)
            self._kernels = self._record = None  # its buffers go first
            self._kernels = TritonSampler(self._vocab_size, *self._sizes, self._device)

    def _begin_record(self, num_groups: int, num_flags: int, num_numbers: int) -> Record:
        """The record, which the kernels write."""
        needed = num_groups, num_flags, num_numbers
        if self._record is None or not _holds(self._room, needed):
            self._room = _doubled(self._room, needed)
            num_groups, num_flags, num_numbers = self._room
            # Kernels are compiled anew for lines that are not aligned: those of each part are.
            decided = Field("decided", (num_groups, _aligned(record_width(self._sizes[2]))))
            others = Field("flags", (num_flags,)), Field("numbers", (num_numbers,), torch.float64)
            self._record = Record(Layout((decided, *others)), self._device, depth=1)
        return self._record


_Sizes = tuple[int, int, int]


def _holds(sizes: _Sizes, needed: _Sizes) -> bool:
    return all(size >= number for size, number in zip(sizes, needed, strict=True))


def _doubled(sizes: _Sizes, needed: _Sizes) -> _Sizes:
    """Powers of two that hold what is needed, and not less than before."""
    first, second, third = (
        max(size, 1 << (number - 1).bit_length() if number else 0) for size, number in zip(sizes, needed, strict=True)
    )
    return first, second, third


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose decisions are under way.

    Attributes:
        width: Tokens that a group's line of the record has room for.
    """

    record: Record
    groups: list[RowGroup]
    width: int
    asking: list[int]
    num_top: list[int]
    numbers_shape: tuple[int, int, int]
    num_flags: int

    def collect(self) -> tuple[list[VerifiedRun], list[LogprobReport], NDArray[np.bool_]]:
        """Each group's run, what to report of it, and the flags. Waits for them."""
        arrays, groups = self.record.collect(), self.groups
        decided = arrays["decided"][: len(groups)].tolist()
        runs = [
            _run_down_tree(record, self.width)
            if group.parents
            else VerifiedRun(tuple(record[NUM_FIXED : NUM_FIXED + 1 + record[NUM_ACCEPTED]]), record[NUM_ACCEPTED])
            for record, group in zip(decided, groups, strict=True)
        ]
        reports: list[LogprobReport] = [None] * len(runs)
        if self.asking:
            reported = arrays["numbers"][: math.prod(self.numbers_shape)].reshape(self.numbers_shape)
            for i, own, top in zip(self.asking, reported, self.num_top, strict=True):
                own = own[: len(runs[i].run)]
                reports[i] = tuple(entries_of(own.tolist(), [top] * len(own)))
        return runs, reports, arrays["flags"][: self.num_flags] != 0


def _run_down_tree(record: list[int], width: int) -> VerifiedRun:
    count = record[NUM_ACCEPTED]
    path = tuple(record[NUM_FIXED + width :][:count])
    return VerifiedRun(tuple(record[NUM_FIXED : NUM_FIXED + count + 1]), count, path)


_BY_ROW = ("sequence", "position", "draft", "parent", "grammar")
_POSITION, _DRAFT = 1, 2
_BY_GROUP = ("first", "count", "top_k", "slot", "allowed")
_FLOATS = ("temperature", "min_p")
_ALONE = (
    "seed",
    "top_p",
    "penalties",
    "ahead",
    "bias_token",
    "bias",
    "masks",
    "ended",
    "bad",
)


def _laid_out(rows: Rows, edits: Edits) -> list[NDArray[Any]]:
    """The arrays of a step but for what is kept by slot; some in one array: see :func:`on_device_as`."""
    parameters, counts, starts = edits.parameters, np.array(rows.counts, np.int32), np.array(rows.starts, np.int32)
    by_row = np.zeros((len(_BY_ROW), _aligned(rows.num_rows)), np.int32)
    by_row[0, : rows.num_rows] = np.arange(len(counts)).repeat(counts)
    by_row[1:, : rows.num_rows] = rows.position_array(), rows.drafts(), rows.parents(), edits.grammar
    by_group = np.zeros((len(_BY_GROUP), _aligned(len(counts))), np.int32)
    of_groups = starts, counts, parameters["top_k"], edits.slots.clip(0), edits.allowed
    by_group[:, : len(counts)] = of_groups
    floats = np.zeros((len(_FLOATS), _aligned(len(counts))), np.float32)
    floats[:, : len(counts)] = [parameters[name] for name in _FLOATS]
    return [
        by_row,
        by_group,
        floats,
        parameters["seed"].view(np.int64),
        parameters["top_p"],
        parameters["penalties"],
        edits.ahead,
        edits.bias_token,
        edits.bias,
        edits.masks,
        edits.ended,
        edits.bad,
    ]


def on_device_as(sent: Sequence[Tensor], counts: TokenCounts) -> SampleStep:
    """The arrays of a step by their names, but for the last ones of :attr:`LaidOut.arrays`."""
    by_row, by_group, floats, *alone = sent
    num_groups, num_rows = len(alone[_ALONE.index("seed")]), len(alone[_ALONE.index("bad")])
    lines = (*by_row[:, :num_rows].unbind(), *by_group[:, :num_groups].unbind(), *floats[:, :num_groups].unbind())
    fields = zip((*_BY_ROW, *_BY_GROUP, *_FLOATS), lines, strict=True)
    more = zip(_ALONE, alone, strict=False)
    return SampleStep(counts=counts.counts, prompt_bits=counts.prompt_bits, **dict(fields), **dict(more))


def _aligned(number: int) -> int:
    """A length that leaves every line at a multiple of 16 bytes: kernels are compiled anew for lines that are not."""
    return -(-number // 4) * 4
